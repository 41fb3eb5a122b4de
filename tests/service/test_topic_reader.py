"""What the operators' commands read, where Kafka is not all there yet."""

import pytest
from aiokafka.errors import GroupCoordinatorNotAvailableError, KafkaError

from service import topic_reader
from service.topic_reader import _coordinated


async def test_a_coordinator_that_is_not_there_yet_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new cluster has none for its first seconds; any other error, and no end of it, is raised."""
    answers: list[object] = [GroupCoordinatorNotAvailableError(), GroupCoordinatorNotAvailableError(), "offsets"]

    async def ask() -> object:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    assert await _coordinated(ask) == "offsets"
    answers[:] = [KafkaError("broken")]
    with pytest.raises(KafkaError, match="broken"):
        await _coordinated(ask)
    monkeypatch.setattr(topic_reader, "_COORDINATOR_S", -1)
    answers[:] = [GroupCoordinatorNotAvailableError()]
    with pytest.raises(GroupCoordinatorNotAvailableError):
        await _coordinated(ask)
