"""Apache Kafka with TLS, SASL and an authoriser: wrong settings get their own sentence, documented rights suffice."""

import asyncio
import re
import shlex
import subprocess
import sys
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from schemas.connection import KafkaConnection
from schemas.reachability import why_unreachable
from service.client import Client
from service.errors import BrokerUnavailable, LaneMissing
from service.topics import create_topics
from tests.e2e.workers import WorkerProcess

pytestmark = pytest.mark.kafka
RECIPE = Path(__file__).resolve().parents[2] / "docs" / "security.md"


@pytest.fixture(scope="module")
def secure(kafka_module: ModuleType) -> Iterator[Any]:
    """A broker that lets nobody do anything yet."""
    with kafka_module.Cluster(secure=True) as running:
        yield running


def connect(cluster: Any, user: str = "worker", **settings: Any) -> KafkaConnection:
    defaults = {"security_protocol": "SASL_SSL", "sasl_username": user, "sasl_password": f"{user}-secret"}
    fields = {"bootstrap": cluster.bootstrap, "ssl_cafile": cluster.ca} | defaults | settings
    return KafkaConnection(**{name: value for name, value in fields.items() if value is not None})


NO_SASL = dict.fromkeys(("sasl_username", "sasl_password"))
NO_TLS = {"ssl_cafile": None}


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"sasl_password": "wrong"}, "does not accept the user 'worker' with this password"),
        ({"sasl_password": "wrong", "sasl_mechanism": "SCRAM-SHA-256"}, "does not accept the user 'worker'"),
        ({"sasl_username": "nobody", "sasl_mechanism": "SCRAM-SHA-256"}, "does not accept the user 'nobody'"),
        ({"sasl_mechanism": "SCRAM-SHA-512"}, "does not offer the sasl_mechanism SCRAM-SHA-512"),
        ({"ssl_cafile": None}, "certificate is not trusted"),
        ({"security_protocol": "PLAINTEXT"} | NO_SASL | NO_TLS, "speaks TLS there: security_protocol must be SSL (or"),
        ({"security_protocol": "SASL_PLAINTEXT"} | NO_TLS, "speaks TLS there: security_protocol must be SASL_SSL"),
        ({"security_protocol": "SSL"} | NO_SASL, "wants a user and a password or a certificate of the client"),
    ],
    ids=["plain", "scram", "user", "mechanism", "certificate", "plaintext", "sasl-plaintext", "no-user"],
)
async def test_each_mistake_has_its_own_sentence(secure: Any, settings: dict[str, Any], sentence: str):
    """aiokafka has one error for all of them."""
    with pytest.raises(BrokerUnavailable, match=re.escape(sentence)):
        async with Client(connection=connect(secure, **settings)):
            pass


@pytest.mark.parametrize("mechanism", ["PLAIN", "SCRAM-SHA-256"])
async def test_right_settings_have_nothing_to_explain(secure: Any, mechanism: str):
    """Both mechanisms over TLS."""
    assert "answered when asked again" in await why_unreachable(connect(secure, sasl_mechanism=mechanism))


async def test_mistakes_at_a_plaintext_broker(kafka: Any, secure: Any):
    """The other way round: it speaks no TLS, and wants no user."""
    tls = KafkaConnection(bootstrap=kafka.bootstrap, security_protocol="SSL", ssl_cafile=secure.ca)
    assert "speaks no TLS there" in await why_unreachable(tls)
    user = connect(secure, bootstrap=kafka.bootstrap, security_protocol="SASL_PLAINTEXT", ssl_cafile=None)
    assert "wants no user and password" in await why_unreachable(user)
    assert "nobody listens there" in await why_unreachable(KafkaConnection(bootstrap="127.0.0.1:1"))
    assert "no host nowhere.invalid" in await why_unreachable(KafkaConnection(bootstrap="nowhere.invalid:1"))


async def test_a_certificate_for_another_host(secure: Any):
    """127.0.0.2 is this machine, too, but not what the certificate says."""
    port = secure.bootstrap.rpartition(":")[2]
    cause = await why_unreachable(connect(secure, bootstrap=f"127.0.0.2:{port}"))
    assert "certificate is not for 127.0.0.2" in cause or "nobody listens" in cause


def test_the_worker_says_it_and_ends(secure: Any, monkeypatch: pytest.MonkeyPatch):
    """Status 1 and one sentence, not tried again; the password is nowhere."""
    for name, value in connect(secure, sasl_password="wr0ng-Passw0rd").environment().items():
        monkeypatch.setenv(name, value)
    command = [sys.executable, "-m", "worker", "--model", "tiny"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 1
    assert "carousel worker: no Kafka at" in ended.stderr
    assert "does not accept the user 'worker' with this password" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert "wr0ng-Passw0rd" not in ended.stderr


def recipe() -> list[list[str]]:
    """The arguments of each kafka-acls.sh in the documentation."""
    lines = [line for line in RECIPE.read_text().splitlines() if line.startswith("kafka-acls.sh ")]
    assert len(lines) == 6
    return [shlex.split(line)[1:] for line in lines]


def grant(cluster: Any, folder: Path) -> None:
    """Runs the recipe as the cluster's super user."""
    config = folder / "admin.properties"
    config.write_text(
        "security.protocol=SASL_SSL\nsasl.mechanism=PLAIN\nsasl.jaas.config="
        'org.apache.kafka.common.security.plain.PlainLoginModule required username="admin" password="admin-secret";\n'
        f"ssl.truststore.type=PEM\nssl.truststore.location={cluster.ca}\n"
    )
    where = ("--bootstrap-server", cluster.bootstrap, "--command-config", config)
    tool = partial(cluster.tool, "org.apache.kafka.tools.AclCommand", *where, timeout=120)
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(lambda words: tool(*words), recipe()))


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_the_documented_rights_suffice(secure: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A worker (SCRAM) and a caller (PLAIN) with the rights of the recipe: answers, cancels, a kill under a supervisor
    that leaves the groups; and nothing beyond. Prompts and answers are in no log."""
    await create_topics(connect(secure, "admin"), partitions=2)
    await asyncio.to_thread(grant, secure, tmp_path)
    for name, value in connect(secure, sasl_mechanism="SCRAM-SHA-256").environment().items():
        monkeypatch.setenv(name, value)
    log, secret = tmp_path / "worker.log", f"S3cret{uuid.uuid4().hex}"
    with WorkerProcess(secure.bootstrap, log, "--supervisor", "--log-level", "debug") as worker:
        async with Client(connection=connect(secure, "caller")) as client:
            answer = await client.complete(prompt=secret, max_tokens=8, temperature=0, tier="interactive")
            assert answer.finish_reason == "length"
            stream = client.stream(prompt=secret, max_tokens=1500, ignore_eos=True, tier="interactive")
            async for _ in stream:
                break
            await worker_child_killed(worker)
            resumed = await stream.completion()
            assert len(resumed.token_ids) == 1500
            left = client.stream(prompt=secret, max_tokens=2000, ignore_eos=True, tier="interactive")
            async for _ in left:
                break
            await left.aclose()
            with pytest.raises(LaneMissing, match="none that this user may see"):
                await client.complete(prompt=secret, tier="batch")
            await cancelled(worker)
        assert worker.stop() == 0
    text = log.read_text()
    assert secret not in text
    assert "supervisor.left_groups" in text
    assert all(not line["failures"] for line in worker.logged("supervisor.left_groups"))
    assert "uthorization" not in text.replace("kafka.auto_creation_unknown", ""), text[-3000:]


async def worker_child_killed(worker: WorkerProcess) -> None:
    (child,) = [int(p) for p in Path(f"/proc/{worker.pid}/task/{worker.pid}/children").read_text().split()]
    subprocess.run(["kill", "-9", str(child)], check=True)


async def cancelled(worker: WorkerProcess) -> None:
    async with asyncio.timeout(30):
        while not any(line["finish_reason"] == "cancelled" for line in worker.logged("request.finished")):
            await asyncio.sleep(0.2)
