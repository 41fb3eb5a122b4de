"""`cluster`: every broker in turn. A broker named by CAROUSEL_TEST_BOOTSTRAP (noida-db, say) is one of them."""

from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

from tests.contract import brokers


@pytest.fixture(scope="session")
def kafka_of_three(kafka_module: ModuleType) -> Iterator[Any]:
    with kafka_module.Cluster(nodes=3) as running:
        yield running


@pytest.fixture(params=brokers.ALL)
def cluster(request: pytest.FixtureRequest) -> brokers.Cluster:
    return request.param(request)
