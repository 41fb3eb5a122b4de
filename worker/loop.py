"""The continuous-batching loop: it ties scheduler, runner and requests together, and knows no Kafka.

Two threads matter (design.md 1). Everything is decided on the event loop; the runner executes on one dedicated
thread. While step N runs there, the event loop publishes the tokens of step N-1.
"""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from time import perf_counter
from typing import NamedTuple, Protocol

import structlog

from schemas.reasons import FinishReason
from worker.engine.outputs import (
    CopySeconds,
    EngineEvent,
    Preemption,
    StepOutcome,
    StepPlan,
    StepRecord,
    TokenEvent,
)
from worker.engine.protocols import Clock, Runner
from worker.engine.request import Request
from worker.engine.scheduler import Scheduler
from worker.engine.step_model import StepModel

MAX_IDLE_S = 1.0
RETRY_PAUSES_S = (0.05, 0.2, 0.8)  # between the tries of a step that fails
_STEP_FAILED = "the model failed while this request was running; the worker's log says how"
log = structlog.get_logger(__name__)


class RequestObserver(Protocol):
    """Follows one request through the engine. Times are of the engine's clock."""

    def seated(self, choice: int, at: float) -> None: ...

    def token(self, choice: int, at: float) -> None: ...

    def preempted(self, preemption: Preemption, at: float, copied_at: float) -> None:
        """It lost its seat at `at`; at `copied_at` that step had ended, and its swap out, if it is one, had begun."""
        ...

    def finished(self, choice: int, at: float) -> None: ...


class StepTimes(NamedTuple):
    """What the time of one step went to, in seconds."""

    schedule: float
    execute: float  # tries again included, copies too
    apply: float
    publish: float
    copies: CopySeconds | None
    num_sequences: int  # with a token in it
    ended: float  # when its tokens had been handed out, on the engine's clock


class StepObserver(Protocol):
    """Follows the steps."""

    def step(self, record: StepRecord, times: StepTimes, events: Sequence[EngineEvent]) -> None: ...

    def step_failed(self) -> None:
        """An execution raised; it may be tried again."""
        ...


class EventStream:
    """The engine's events of one request, in order. One reader. `on_seat`: called when it first takes a seat."""

    def __init__(
        self,
        num_choices: int,
        on_seat: Callable[[], None] = lambda: None,
        observer: RequestObserver | None = None,
    ) -> None:
        self._events: list[EngineEvent] = []
        self._ready = asyncio.Event()
        self._collecting = False  # events wait for `_release`, or for the last of them
        self._num_open = num_choices
        self._on_seat = on_seat
        self.observer = observer
        self.admitted_at: float | None = None  # when it first took a seat, on the engine's clock
        self.first_token_at: float | None = None
        self.last_token_at: float | None = None
        self.num_tokens = [0] * num_choices  # that came, by choice

    @property
    def seconds_per_token(self) -> float | None:
        """Between the tokens of its longest choice, on average; None for fewer than two."""
        if self.first_token_at is None or self.last_token_at is None or max(self.num_tokens) < 2:
            return None
        return (self.last_token_at - self.first_token_at) / (max(self.num_tokens) - 1)

    @property
    def finished(self) -> bool:
        """All choices have ended; `take` may still hold events."""
        return self._num_open == 0

    def take_seat(self, now: float) -> None:
        if self.admitted_at is None:
            self.admitted_at = now
            self._on_seat()

    def push(self, event: EngineEvent, now: float) -> None:
        self._events.append(event)
        if isinstance(event, TokenEvent):
            if self.first_token_at is None:
                self.first_token_at = now
            self.last_token_at = now
            self.num_tokens[event.choice] += 1
            if self.observer is not None:
                self.observer.token(event.choice, now)
        else:
            self._num_open -= 1
            if self.observer is not None:
                self.observer.finished(event.choice, now)
        if not self._collecting or self.finished:
            self._ready.set()

    async def take(self, not_before: float | None = None) -> list[EngineEvent]:
        """Waits for events and takes all that are there.

        Args:
            not_before: event loop time until which more are collected, unless the request finishes.
        """
        if not_before is not None and not self.finished:
            # One timer instead of a wake-up a token: what collecting is for is that less is done.
            self._collecting = True
            self._ready.clear()
            timer = asyncio.get_running_loop().call_at(not_before, self._release)
            try:
                await self._ready.wait()
            finally:
                timer.cancel()
                self._release()  # also for who takes next, when this wait was cancelled
        else:
            await self._ready.wait()
        self._ready.clear()
        events, self._events = self._events, []
        return events

    def _release(self) -> None:
        self._collecting = False
        if self._events:
            self._ready.set()


class EngineLoop:
    """Runs steps while there is work. All methods are called on the event loop.

    Args:
        on_step: called with the record of every step.
        step_model: learns from every step how long steps take.
        observer: told of every step, after `on_step`.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        clock: Clock,
        on_step: Callable[[StepRecord], None] | None = None,
        step_model: StepModel | None = None,
        observer: StepObserver | None = None,
    ) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self.clock = clock
        self._on_step = on_step
        self._step_model = step_model
        self._observer = observer
        self._streams: dict[str, EventStream] = {}
        self._wake = asyncio.Event()
        self._stopping = False
        self.step_began: float | None = None  # of the step that is being executed, on `clock`

    @property
    def scheduler(self) -> Scheduler:
        """For statistics and integrity checks."""
        return self._scheduler

    @property
    def step_seconds(self) -> float:
        """How long the step that is being executed has taken so far; 0 without one."""
        began = self.step_began  # once: another thread asks, and the step may end meanwhile
        return 0.0 if began is None else self.clock.now() - began

    def add(
        self,
        request: Request,
        on_seat: Callable[[], None] = lambda: None,
        observer: RequestObserver | None = None,
    ) -> EventStream:
        """Hands a request to the scheduler. A resumed one may find itself complete at once."""
        stream = self._streams[request.request_id] = EventStream(request.n, on_seat, observer)
        self._dispatch(self._scheduler.add(request))
        self._wake.set()
        return stream

    def cancel(self, request_id: str, reason: FinishReason) -> None:
        """Ends a request with a finish event per unfinished choice; nothing happens when it is not there."""
        self._dispatch(self._scheduler.cancel(request_id, reason))
        self._wake.set()

    def abort(self, request_id: str) -> None:
        """Drops a request without events: it goes on elsewhere, or in a new attempt."""
        if self._streams.pop(request_id, None) is not None:
            self._scheduler.abort(request_id)
            self._wake.set()

    def wake(self) -> None:
        """Something outside has changed who may run: an idle loop looks again."""
        self._wake.set()

    def stop(self) -> None:
        """Ends `run` after the step in flight. Requests that are still here stay unfinished."""
        self._stopping = True
        self._wake.set()

    async def run(self) -> None:
        """Steps until `stop`."""
        with ThreadPoolExecutor(1, thread_name_prefix="step") as step_thread:
            while not self._stopping:
                begins = perf_counter()
                plan, events = self._scheduler.schedule(self.clock.now())
                planned = perf_counter()
                self._dispatch(events)
                if plan is None:
                    await self._idle()
                    continue
                began = self.step_began = self.clock.now()
                executes = perf_counter()
                outcome = await self._execute(plan, step_thread)
                executed = perf_counter()
                self.step_began = None
                if self._step_model is not None:
                    self._step_model.observe_plan(plan, self.clock.now() - began)
                applies = perf_counter()
                events = self._scheduler.apply(outcome, self.clock.now())
                applied = perf_counter()
                record = self._record()  # first: a stream that ends with this step took its seat before
                self._dispatch(events)
                if self._observer is not None and record is not None:
                    times = StepTimes(
                        schedule=planned - begins,
                        execute=executed - executes,
                        apply=applied - applies,
                        publish=perf_counter() - applied,
                        copies=outcome.copy_seconds,
                        num_sequences=len(plan.scheduled),
                        ended=self.clock.now(),
                    )
                    self._observer.step(record, times, events)

    async def _execute(self, plan: StepPlan, step_thread: ThreadPoolExecutor) -> StepOutcome:
        """Runs a plan, again when it fails: what passes with time is not the callers' business (protocol.md 7).

        After the last try the plan's requests end with an error; all others go on.
        """
        for pause in (*RETRY_PAUSES_S, None):
            try:
                return await asyncio.get_running_loop().run_in_executor(step_thread, self._runner.execute, plan)
            except Exception:
                log.exception("step.failed", step=plan.step, sequences=len(plan.scheduled), again_in=pause)
                if self._observer is not None:
                    self._observer.step_failed()
                if pause is not None:
                    await asyncio.sleep(pause)
        failed = {s.seq_id: _STEP_FAILED for s in plan.scheduled}
        return StepOutcome(plan.step, failed=failed, failed_copies=plan.all_copies)

    async def _idle(self) -> None:
        self._wake.clear()
        deadline = self._scheduler.next_deadline
        wait = MAX_IDLE_S if deadline is None else min(MAX_IDLE_S, max(0.0, deadline - self.clock.now()))
        try:
            await asyncio.wait_for(self._wake.wait(), wait)
        except TimeoutError:
            return

    def _record(self) -> StepRecord | None:
        record = self._scheduler.last_record
        if record is None:
            return None
        for preemption in record.preempted:
            stream = self._streams.get(preemption.request_id)
            if stream is not None and stream.observer is not None:
                stream.observer.preempted(preemption, record.at, self.clock.now())
        for request_id, choice in record.seated:
            stream = self._streams.get(request_id)
            if stream is not None:
                stream.take_seat(record.at)
                if stream.observer is not None:
                    stream.observer.seated(choice, record.at)
        if self._on_step is not None:
            self._on_step(record)
        return record

    def _dispatch(self, events: Sequence[EngineEvent]) -> None:
        now = self.clock.now() if events else 0.0
        for event in events:
            stream = self._streams.get(event.request_id)
            if stream is None:
                continue
            stream.push(event, now)
            if stream.finished:
                del self._streams[event.request_id]
