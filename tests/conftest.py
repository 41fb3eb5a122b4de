"""Brokers for all tests: the embedded one, and Apache Kafka where there is one."""

import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from service.broker import EmbeddedBroker

ROOT = Path(__file__).resolve().parent.parent
SHARED = ROOT.parent / "shared"


@pytest.fixture(scope="session")
def broker() -> Iterator[EmbeddedBroker]:
    """The embedded broker, one for the session."""
    with EmbeddedBroker() as running:
        yield running


@pytest.fixture(scope="session")
def kafka_module() -> ModuleType:
    """The `cluster` module that starts Apache Kafka; skips with the reason where there is none."""
    folder = Path(os.environ.get("KAFKA_HOME") or SHARED / "kafka")
    path = folder / "cluster.py"
    if not path.is_file():
        pytest.skip(f"no Apache Kafka: {folder} has no cluster.py (KAFKA_HOME names another folder)")
    spec = importlib.util.spec_from_file_location("cluster", path)
    assert spec is not None
    assert spec.loader is not None
    cluster = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(cluster)
    if reason := cluster.available():
        pytest.skip(reason)
    return cluster


@pytest.fixture(scope="session")
def kafka(kafka_module: ModuleType) -> Iterator[Any]:
    """Apache Kafka, one broker for the session: a `cluster.Cluster`."""
    with kafka_module.Cluster() as running:
        yield running


@pytest.fixture(scope="session")
def checks() -> Path:
    """The folder of the black-box checks; skips where it is missing. Importable after this."""
    folder = SHARED / "checks"
    if not (folder / "raw_client.py").is_file():
        pytest.skip(f"no black-box checks: {folder} does not exist")
    sys.path.append(str(folder))
    return folder
