"""The local stack for real: containers of docker-compose.yml on an engine of the test's own, with stand-in images.

Grafana and the Kafka UI have no stand-in and are not started. The tests go in order: the last one takes the stack down.
"""

import asyncio
import json
import os
import re
import shutil
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.beside import Missing, free_port, tool
from carousel import Client, Tokens
from tests import others
from tests.deploy.stack import ROOT
from tests.deploy.stand_ins import import_all
from tests.deploy.test_dashboards import dashboard_expressions, filled_in

pytestmark = [pytest.mark.stack, pytest.mark.slow, pytest.mark.timeout(1800)]
SERVICES = ("worker", "console", "otel-collector", "jaeger", "prometheus")  # and what they depend on
PORTS = ("KAFKA_PORT", "CONSOLE_PORT", "OTLP_PORT", "JAEGER_PORT", "PROMETHEUS_PORT")
# Nothing failed and nobody was throttled here.
MAY_BE_EMPTY = {"kafka: Dead letters", "tenants: Had to wait for their quota"}


class Stack:
    """An engine with its own data and socket, and `docker compose` on it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        plugins = folder / "config/cli-plugins"
        plugins.mkdir(parents=True)
        (plugins / "docker-compose").symlink_to(tool("docker-compose"))
        self.ports = {name: free_port() for name in PORTS}
        self.environment = {
            "PATH": os.environ["PATH"],
            "HOME": str(folder),
            "DOCKER_HOST": f"unix://{folder}/docker.sock",
            "DOCKER_CONFIG": str(folder / "config"),
            "DOCKER_BUILDKIT": "0",  # buildx is not everywhere
        }
        given = {
            "COMPOSE_PROFILES": "cpu,obs",
            "CAROUSEL_MODEL": "tiny",
            "OTEL_EXPORTER_OTLP_ENDPOINT": "http://otel-collector:4318",
        }
        lines = [f"{name}={value}" for name, value in (given | self.ports).items()]
        (folder / "env").write_text("\n".join(lines))

    def start_engine(self) -> subprocess.Popen[bytes]:
        folder = self._folder
        words = ["dockerd", "--host", f"unix://{folder}/docker.sock", "--pidfile", f"{folder}/pid", "--bridge", "none"]
        words += ["--data-root", f"{folder}/data", "--exec-root", f"{folder}/exec"]
        with (folder / "dockerd.log").open("wb") as log:
            engine = subprocess.Popen(words, stdout=log, stderr=log)
        until(lambda: engine.poll() is not None or self.docker("info", check=False).returncode == 0, "the engine", 60)
        if engine.poll() is not None:
            last = (folder / "dockerd.log").read_text().splitlines()[-1]
            pytest.skip(f"no container engine can run here: {last}")
        return engine

    def docker(
        self, *words: str, check: bool = True, timeout: float = 300, environment: dict[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            ["docker", *words],
            cwd=ROOT,
            env=environment or self.environment,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            check=False,
            timeout=timeout,
        )
        assert not check or done.returncode == 0, f"docker {' '.join(words)}: {done.stdout}{done.stderr}"
        return done

    def compose(self, *words: str) -> str:
        return self.docker("compose", "--env-file", str(self._folder / "env"), *words).stdout

    def get(self, port: str, path: str) -> Any:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.ports[port]}{path}", timeout=10) as response:
            return json.load(response)

    def query(self, expression: str) -> list[dict[str, Any]]:
        """Prometheus' answer to it, now."""
        answer = self.get("PROMETHEUS_PORT", "/api/v1/query?" + urllib.parse.urlencode({"query": expression}))
        assert answer["status"] == "success"
        found: list[dict[str, Any]] = answer["data"]["result"]
        return found


def until(condition: Callable[[], Any], what: str, timeout: float = 60) -> Any:
    """Its first true value."""
    end = time.monotonic() + timeout
    while not (found := condition()):
        assert time.monotonic() < end, f"{what} did not come within {timeout:.0f} s"
        time.sleep(0.5)
    return found


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Up and healthy, its image built from our Dockerfile on a stand-in base."""
    if not all(map(shutil.which, ("dockerd", "docker", "iptables-save"))):
        pytest.skip("no container engine: install Debian's package docker.io")
    if os.geteuid() != 0:
        pytest.skip("a container engine of one's own needs root")
    folder = tmp_path_factory.mktemp("engine")
    try:
        made = Stack(folder)
    except Missing as reason:
        pytest.skip(str(reason))
    rules = subprocess.run(["iptables-save"], capture_output=True, check=True).stdout  # the engine adds its own
    engine = made.start_engine()
    try:
        try:
            list(import_all(["docker"], made.environment))
        except Missing as reason:
            pytest.skip(str(reason))
        # Without a bridge network; from where this machine's pip takes its packages.
        build = ("build", "--network", "host")
        made.docker(
            *build, "-t", "carousel:cpu", "--build-arg", "TORCH_INDEX=https://pypi.org/simple", ".", timeout=1200
        )
        file = "deploy/otel-collector.Dockerfile"
        made.docker("build", "-t", "carousel-otel-collector:0.159.0", "-f", file, "deploy")
        # As `make up` does it, with what can run here.
        bare = made.environment | {"COMPOSE_PROFILES": "cpu"}
        made.docker("compose", "--env-file", f"{folder}/env", "up", "--wait", "--no-build", environment=bare)
        made.compose("up", "--wait", "--no-build", *SERVICES)
        yield made
    finally:
        made.docker("compose", "--profile", "*", "down", "--volumes", "--timeout", "5", check=False)
        others.end(engine, limit=60)
        for mount in re.findall(rf"^\S+ ({folder}\S*)", Path("/proc/mounts").read_text(), re.MULTILINE):
            subprocess.run(["umount", mount], check=False)
        subprocess.run(["iptables-restore"], input=rules, check=False)
        shutil.rmtree(folder, ignore_errors=True)


def test_everything_is_healthy(stack: Stack):
    """Each service that stays says so by its own check; the topics are there; nobody of ours is root."""
    listed = [json.loads(line) for line in stack.compose("ps", "--all", "--format", "json").splitlines()]
    states = {each["Service"]: (each["State"], each["Health"], each["ExitCode"]) for each in listed}
    assert states == dict.fromkeys((*SERVICES, "kafka"), ("running", "healthy", 0)) | {"topics": ("exited", "", 0)}
    for service in ("worker", "console", "otel-collector"):
        assert stack.compose("exec", "-T", service, "id", "-u").strip() == "10001"


def test_the_client_example_is_answered_traced_and_counted(stack: Stack):
    """Its tokens come, its trace is in Jaeger, its counters are in Prometheus, and the page passes the worker on."""
    assert stack.compose("run", "--rm", "-T", "client", "What is the capital of France?").strip()

    def names() -> set[str]:
        traces = stack.get("JAEGER_PORT", "/api/traces?service=carousel-worker&limit=20")["data"]
        spans = [{span["operationName"] for span in trace["spans"]} for trace in traces]
        return next((found for found in spans if "process prompts.interactive" in found), set())

    found = until(names, "a trace")
    assert {"llm.queue", "llm.prefill", "llm.decode", "send replies.{correlation_id}"} <= found
    (counted,) = until(lambda: stack.query('llm_requests_total{tier="interactive"} > 0'), "a counter")
    assert (counted["metric"]["outcome"], counted["value"][1]) == ("answered", "1")
    assert stack.get("CONSOLE_PORT", "/snapshot")["reasons"] == []
    groups = stack.get("PROMETHEUS_PORT", "/api/v1/rules")["data"]["groups"]
    assert {rule["health"] for group in groups for rule in group["rules"]} == {"ok"}


async def test_a_worker_killed_in_mid_stream(stack: Stack):
    """`docker compose kill worker`, and `up` again: the caller, on this machine, sees every token once, in order."""
    request: dict[str, Any] = {"prompt": "A long story", "tier": "batch", "max_tokens": 400, "ignore_eos": True}
    async with Client(f"localhost:{stack.ports['KAFKA_PORT']}", tenant="acme") as client:
        expected = await client.complete(**request, temperature=0)
        seen: list[int] = []
        killed = False
        async with client.stream(**request, temperature=0, timeout=120) as stream:
            async for event in stream:
                if isinstance(event, Tokens):
                    assert event.position == len(seen)
                    seen += event.token_ids
                if seen and not killed:
                    killed = True
                    await asyncio.to_thread(stack.compose, "kill", "worker")
                    await asyncio.to_thread(stack.compose, "up", "--detach", "--no-build", "worker")
    assert killed
    assert len(seen) == 400
    assert seen == list(expected.token_ids)


def test_every_panel_has_data(stack: Stack):
    """After some load each query of each dashboard is answered, with data but where there can be none."""
    stack.compose("up", "--wait", "--no-build", "worker")

    async def load() -> None:
        async with Client(f"localhost:{stack.ports['KAFKA_PORT']}", tenant="acme") as client:
            for _ in range(2):
                jobs = [
                    client.complete(prompt=f"Number {i}", tier=tier, max_tokens=40)
                    for i in range(10)
                    for tier in ("interactive", "standard", "batch")
                ]
                await asyncio.gather(*jobs)
                await asyncio.sleep(6)  # a scrape

    asyncio.run(load())
    empty = set()
    for where, expression in dashboard_expressions():
        if not stack.query(filled_in(expression, "1m")):
            empty.add(where)
    assert empty <= MAY_BE_EMPTY


def test_make_down_leaves_nothing(stack: Stack):
    """No container, no volume, no network."""
    done = subprocess.run(
        ["make", "down"], cwd=ROOT, env=stack.environment, capture_output=True, text=True, check=False, timeout=200
    )
    assert done.returncode == 0, done.stderr
    assert stack.docker("ps", "--all", "--quiet").stdout == ""
    assert stack.docker("volume", "ls", "--quiet").stdout == ""
    assert set(stack.docker("network", "ls", "--format", "{{.Name}}").stdout.split()) == {"host", "none"}
