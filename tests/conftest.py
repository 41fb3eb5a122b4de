"""Brokers for all tests: the embedded one, and Apache Kafka where there is one."""

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import structlog

from bench.beside import Missing, checks_folder, kafka_cluster
from service.broker import EmbeddedBroker


@pytest.fixture(autouse=True)
def logging_as_it_was() -> Iterator[None]:
    """What a test configures of structlog (a command does) is not the next one's: lines would be missing there."""
    yield
    structlog.reset_defaults()


@pytest.fixture(scope="session")
def broker() -> Iterator[EmbeddedBroker]:
    """The embedded broker, one for the session."""
    with EmbeddedBroker() as running:
        yield running


@pytest.fixture(scope="session")
def kafka_module() -> ModuleType:
    """The `cluster` module that starts Apache Kafka; skips with the reason where there is none."""
    try:
        return kafka_cluster()
    except Missing as reason:
        pytest.skip(str(reason))


@pytest.fixture(scope="session")
def kafka(kafka_module: ModuleType) -> Iterator[Any]:
    """Apache Kafka, one broker for the session: a `cluster.Cluster`."""
    with kafka_module.Cluster() as running:
        yield running


@pytest.fixture(scope="session")
def checks() -> Path:
    """The folder of the black-box checks; skips where it is missing. Importable after this."""
    try:
        return checks_folder()
    except Missing as reason:
        pytest.skip(str(reason))
