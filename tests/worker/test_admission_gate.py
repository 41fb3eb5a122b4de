"""The gate alone: who is let in when, on a clock by hand."""

import asyncio

from tests.engine.builders import make_request
from tests.worker.world import WallClock, turns
from worker.admission_gate import AdmissionGate
from worker.engine.admission import Admission, Admit, Begun
from worker.engine.quota import Quotas
from worker.engine.request import Request
from worker.engine.step_model import StepModel
from worker.engine.tiers import TenantPolicy


class Door:
    """A gate that lets a tenant in once a second, and who has passed it."""

    def __init__(self) -> None:
        self.clock = WallClock()
        quotas = Quotas({"t": TenantPolicy(name="t", requests_per_s=1.0)}, burst_seconds=1.0)
        self.gate = AdmissionGate(Admission({}, quotas, {}, StepModel(), chunk=16), self.clock, self.clock.call_at)
        self.requests: dict[str, Request] = {}
        self.cancelled: list[str] = []
        self.passed: list[str] = []

    async def enter(self, request_id: str, begun: asyncio.Future[Begun] | None = None) -> None:
        request = self.requests[request_id] = make_request(request_id, tenant="t", arrival=self.clock.now())

        async def has_begun() -> Begun:
            return Begun.NO if begun is None else await begun

        decision = await self.gate.enter(request, has_begun, lambda: request_id in self.cancelled)
        assert isinstance(decision, Admit)
        self.passed.append(request_id)

    def leave(self, request_id: str) -> None:
        self.gate.leave(self.requests[request_id], 0)


async def test_who_passes_wakes_the_next():
    """b, that others wait behind, is cancelled: c starts a second earlier and, while it runs on, so does d."""
    door = Door()
    async with asyncio.TaskGroup() as group:
        for name in "abcd":
            group.create_task(door.enter(name))
        await turns(10)
        door.cancelled.append("b")
        door.gate.wake("b")
        await turns(10)
        door.leave("b")
        for second, name in ((1.0, "c"), (2.0, "d")):
            door.clock.move_to(second)
            await turns(10)
            assert door.passed[-1] == name
    assert door.passed == ["a", "b", "c", "d"]


async def test_one_that_turns_out_to_have_begun_makes_way():
    """It was delayed until that was known: it pays nothing, and who came behind it has its time."""
    door, begun = Door(), asyncio.get_running_loop().create_future()
    async with asyncio.TaskGroup() as group:
        group.create_task(door.enter("a"))
        group.create_task(door.enter("b", begun))
        group.create_task(door.enter("c"))
        await turns(10)
        begun.set_result(Begun.YES)
        await turns(10)
        assert door.passed == ["a", "b"]
        door.clock.move_to(1.0)
        await turns(10)
        assert door.passed == ["a", "b", "c"]


async def test_what_an_earlier_attempt_has_paid_is_given_back_at_once():
    """Waived while it runs: the next one's turn comes a second earlier."""
    door = Door()
    async with asyncio.TaskGroup() as group:
        for name in "abc":
            group.create_task(door.enter(name))
        await turns(10)
        door.clock.move_to(0.5)
        door.gate.waive(door.requests["a"])
        await turns(10)
        assert door.passed == ["a", "b"]
        door.clock.move_to(1.0)
        await turns(10)
    assert door.passed == ["a", "b", "c"]
