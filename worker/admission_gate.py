"""The asyncio side of admission: requests that wait for their tenant's quota, each in its own task.

A delayed request holds a reservation of its tenant's quota and nothing else: it has not begun, so it has no seat, no
block and no record in its reply log, and whoever owns its partition next decides anew.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Protocol

from worker.engine.admission import Admission, Admit, Begun, Decision, Delay
from worker.engine.protocols import Clock
from worker.engine.quota import NEVER
from worker.engine.request import Request


class Timer(Protocol):
    def cancel(self) -> None: ...


CallAt = Callable[[float, Callable[[], None]], Timer]


class AdmissionGate:
    """Lets requests in when Admission says so. All methods are called on the event loop.

    Args:
        clock: the engine's.
        call_at: calls a function at a time of that clock (default: on the running event loop).
    """

    def __init__(self, admission: Admission, clock: Clock, call_at: CallAt | None = None) -> None:
        self._admission = admission
        self._clock = clock
        self._call_at = call_at or self._call_later
        self._wakes: dict[str, asyncio.Event] = {}  # of the delayed, by request id
        self._is_closed = False
        self.fraction = 1.0  # of every limit, which this worker enforces

    @property
    def num_delayed(self) -> int:
        return len(self._wakes)

    def queued_tokens(self, lane: str) -> int:
        """Prompt tokens of that tier that were admitted and have not started."""
        return self._admission.queued_tokens(lane)

    def share(self, fraction: float) -> None:
        """This worker enforces `fraction` (0 to 1) of every limit from now on."""
        self.fraction = fraction
        self._admission.share(fraction, self._clock.now())
        self._wake_all()

    def close(self) -> None:
        """The worker drains: whoever is delayed, now or later, leaves `enter` with its Delay."""
        self._is_closed = True
        self._wake_all()

    async def enter(
        self,
        request: Request,
        begun: Callable[[], Awaitable[Begun]],
        is_cancelled: Callable[[], bool],
        delayed: Callable[[], None] = lambda: None,
    ) -> Decision:
        """Waits until a request may go to the engine (Admit), or not at all (Refuse). `leave` must follow.

        Admit comes early when the request is cancelled or its deadline has come: the engine ends it, without a seat.
        Delay only comes from a gate that is closed: then the request is for the next owner of its partition.

        Args:
            begun: asked when the request would be delayed or refused; may take its time.
            is_cancelled: asked before it waits, and after `wake`.
            delayed: told once when it has to wait.
        """
        known = Begun.NO
        decision = self._admission.decide(request, self._clock.now())
        if not isinstance(decision, Admit):
            known = await begun()
            if known is not Begun.NO:
                decision = self._admission.decide(request, self._clock.now(), known)
            self._wake_next(request.tenant)
        if isinstance(decision, Delay):
            delayed()
        while isinstance(decision, Delay):
            if not await self._covered(request, is_cancelled):
                return decision if self._is_closed else Admit()
            decision = self._admission.decide(request, self._clock.now(), known)
            self._wake_next(request.tenant)
        return decision

    async def _covered(self, request: Request, is_cancelled: Callable[[], bool]) -> bool:
        """Waits until its reservation is good; False when something else comes first."""
        wake = self._wakes[request.request_id] = asyncio.Event()
        deadline = NEVER if request.deadline is None else request.deadline
        try:
            while True:
                ready = self._admission.quotas.reserved_until(request.request_id)
                assert ready is not None, "a delayed request has a reservation"
                now = self._clock.now()
                if self._is_closed or is_cancelled() or deadline <= now:
                    return False
                if ready <= now:
                    return True
                until = min(ready, deadline)
                timer = self._call_at(until, wake.set) if until < NEVER else None
                try:
                    await wake.wait()
                finally:
                    if timer is not None:
                        timer.cancel()
                wake.clear()
        finally:
            del self._wakes[request.request_id]

    def wake(self, request_id: str) -> None:
        """Something has changed for a request: if it is delayed, it looks again."""
        if request_id in self._wakes:
            self._wakes[request_id].set()

    def started(self, request_id: str) -> None:
        """It has taken its first seat."""
        self._admission.started(request_id)

    def waive(self, request: Request) -> None:
        """An earlier attempt has paid for it: its tenant's quota is given back."""
        self._admission.quotas.cancel(request.request_id, self._clock.now())
        self._wake_next(request.tenant)

    def leave(self, request: Request, num_output: int) -> None:
        """It is over here, in whatever way, after so many output tokens over all choices. Again: nothing."""
        self._admission.ended(request, num_output, self._clock.now())
        self._wake_next(request.tenant)

    def _wake_next(self, tenant: str) -> None:
        """What was given back may cover the delayed of a tenant sooner: those that it does look again, and the first of
        the others. That one wakes the next in turn, so what many wait for is not told to all of them each time."""
        now = self._clock.now()
        for request_id, ready in self._admission.quotas.reservations(tenant):
            self.wake(request_id)
            if ready > now:
                return

    def _wake_all(self) -> None:
        for wake in self._wakes.values():
            wake.set()

    def _call_later(self, at: float, function: Callable[[], None]) -> Timer:
        return asyncio.get_running_loop().call_later(max(0.0, at - self._clock.now()), function)
