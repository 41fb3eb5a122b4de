"""Builders of requests and engines with defaults, and a loop that drives an engine to its end."""

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import replace

from worker.engine.fakes import ByteDetokenizer, FakeRunner
from worker.engine.outputs import EngineEvent, FinishEvent, SamplingParams, StepRecord, TokenEvent
from worker.engine.request import Request
from worker.engine.scheduler import Scheduler, SchedulerConfig

EOS = 300  # above the bytes, so ByteDetokenizer takes it for special

_REQUEST = Request(
    request_id="r",
    prompt_token_ids=(1, 2, 3),
    sampling=SamplingParams(),
    max_tokens=8,
    eos_token_ids=(EOS,),
    stop_token_ids=(),
    stop=(),
    ignore_eos=False,
    n=1,
    lane="standard",
    tenant="default",
    priority=4,
    arrival=0.0,
    deadline=None,
    new_detokenizer=ByteDetokenizer,
)


def make_request(request_id: str = "r", *, prompt: int | Iterable[int] = 3, **fields: object) -> Request:
    """A request; `prompt`: its tokens, or how many."""
    token_ids = range(1, prompt + 1) if isinstance(prompt, int) else prompt
    return replace(_REQUEST, request_id=request_id, prompt_token_ids=tuple(token_ids), **fields)


def make_config(**limits: object) -> SchedulerConfig:
    defaults = {
        "num_blocks": 64,
        "block_size": 4,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 16,
        "max_model_len": 200,
    }
    return SchedulerConfig(**{**defaults, **limits})


class ScriptedRunner(FakeRunner):
    """A fake runner that says what the test wants: per choice a list of tokens, by how many were generated before."""

    def __init__(self, config: SchedulerConfig, *scripts: Iterable[int]) -> None:
        super().__init__(config)
        self._scripts = [list(script) for script in scripts]

    def next_token(self, token_ids: list[int], num_prompt_tokens: int, choice: int) -> int:
        return self._scripts[choice][len(token_ids) - num_prompt_tokens]


class Engine:
    """A scheduler, its runner and all that came out. Integrity is checked after every change."""

    def __init__(self, runner: Callable[[SchedulerConfig], FakeRunner] = FakeRunner, **fields: object) -> None:
        """fields: of the configuration, and the scheduler's `waiting`, `cost` and `prefill_budget`."""
        parts = {name: fields.pop(name) for name in ("waiting", "cost", "prefill_budget") if name in fields}
        self.config = make_config(**fields)
        self.scheduler = Scheduler(self.config, **parts)
        self.runner = runner(self.config)
        self.now = 0.0
        self.events: list[EngineEvent] = []
        self._by_choice: defaultdict[tuple[str, int], list[EngineEvent]] = defaultdict(list)
        self.records: list[StepRecord] = []

    def add(self, *requests: Request) -> None:
        for request in requests:
            self._take(self.scheduler.add(request))

    def step(self, in_flight: Callable[[], object] | None = None) -> StepRecord | None:
        """One step, `in_flight` called between plan and outcome; its record, or None when there was nothing to run."""
        plan, events = self.scheduler.schedule(self.now)
        self._take(events)
        if plan is None:
            return None
        outcome = self.runner.execute(plan)
        if in_flight is not None:
            in_flight()
            self.scheduler.check_integrity()
        self._take(self.scheduler.apply(outcome, self.now))
        record = self.scheduler.last_record
        assert record is not None
        assert record.step == plan.step
        self.records.append(record)
        return record

    def cancel(self, request_id: str, reason: object) -> None:
        self._take(self.scheduler.cancel(request_id, reason))

    def run(self, max_steps: int = 10_000) -> None:
        """Steps until nothing is left; asserts that an idle engine holds nothing."""
        while self.scheduler.has_work:
            assert len(self.records) < max_steps, "the engine does not come to an end"
            self.step()
        assert self.scheduler.schedule(self.now) == (None, [])
        assert self.scheduler.stats().num_blocks_used == 0
        assert self.scheduler.next_deadline is None

    def tokens(self, request_id: str = "r", choice: int = 0) -> list[int]:
        own = self.events_of(request_id, choice)
        return [event.token.token_id for event in own if isinstance(event, TokenEvent)]

    def text(self, request_id: str = "r", choice: int = 0) -> str:
        """All that the caller of that choice may show."""
        own = self.events_of(request_id, choice)
        return "".join(event.text if isinstance(event, TokenEvent) else event.tail for event in own)

    def finish(self, request_id: str = "r", choice: int = 0) -> FinishEvent:
        """How that choice ended. Asserts that it ended once, and that nothing came after."""
        own = self.events_of(request_id, choice)
        ends = [event for event in own if isinstance(event, FinishEvent)]
        assert len(ends) == 1, f"{len(ends)} ends"
        assert own[-1] is ends[0], "an event after the end"
        return ends[0]

    def events_of(self, request_id: str, choice: int) -> list[EngineEvent]:
        return self._by_choice[request_id, choice]

    def _take(self, events: list[EngineEvent]) -> None:
        self.events += events
        for event in events:
            self.events_of(event.request_id, event.choice).append(event)
        self.scheduler.check_integrity()
