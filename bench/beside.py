"""What lies beside the repository, in ../shared, and is not needed to run it: Apache Kafka, the independent checks."""

import contextlib
import importlib.util
import os
import random
import socket
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

SHARED = Path(__file__).resolve().parent.parent.parent / "shared"
_given: set[int] = set()  # ports, by `free_port`


class Missing(Exception):
    """The message says what is missing and where it was looked for."""


def kafka_cluster() -> ModuleType:
    """The module `cluster` that starts Apache Kafka. Raises Missing, also when there is no Java."""
    folder = Path(os.environ.get("KAFKA_HOME") or SHARED / "kafka")
    path = folder / "cluster.py"
    if not path.is_file():
        raise Missing(f"no Apache Kafka: {folder} has no cluster.py (KAFKA_HOME names another folder)")
    spec = importlib.util.spec_from_file_location("cluster", path)
    assert spec is not None
    assert spec.loader is not None
    cluster = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(cluster)
    cluster.free_port = free_port  # type: ignore[attr-defined]
    if reason := cluster.available():
        raise Missing(reason)
    return cluster


def free_port() -> int:
    """A port that no outgoing connection gets by chance, another at each call.

    A broker that restarts must find it free. A client that tries a port of the ephemeral range while nobody listens may
    even connect to itself there.
    """
    ephemeral = Path("/proc/sys/net/ipv4/ip_local_port_range")
    highest = int(ephemeral.read_text().split()[0]) if ephemeral.exists() else 32_768
    while True:
        port = random.SystemRandom().randrange(10_000, highest)
        if port in _given:
            continue
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        _given.add(port)
        return port


def prefer(cluster: Any) -> None:
    """Its brokers have more of the processors than others, where we may say so.

    A broker that a busy machine starves loses its sessions and its quorum, and is then what the measurement measures.
    """
    for node in cluster.nodes:
        with contextlib.suppress(OSError):  # not root, or not running
            os.setpriority(os.PRIO_PROCESS, node.process.pid, -10)
            Path(f"/proc/{node.process.pid}/autogroup").write_text("-10")  # where it is on, nothing else counts


def checks_folder() -> Path:
    """The folder of the independent checks (reader, mock_cluster, ...), importable from now on. Raises Missing."""
    folder = SHARED / "checks"
    if not (folder / "reader.py").is_file():
        raise Missing(f"no independent checks: {folder} does not exist")
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
    return folder


def tool(name: str) -> Path:
    """A program of ../shared/tools, unpacked: docker-compose, jaeger, otelcol. Raises Missing."""
    get = SHARED / "tools" / "get"
    if not get.is_file():
        raise Missing(f"no {name}: {get.parent} does not exist")
    found = subprocess.run([sys.executable, str(get), name], capture_output=True, text=True, check=False, timeout=120)
    if found.returncode:
        raise Missing(f"no {name}: {found.stderr.strip()}")
    return Path(found.stdout.strip())
