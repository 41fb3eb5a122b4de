"""A worker's server and engine on an in-memory broker: everything but Kafka and torch is the real code."""

import asyncio
import contextlib
import heapq
import itertools
import json
from collections.abc import Callable, Iterator, Sequence

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from schemas.headers import ReplyAddress
from schemas.records import ReplyRecord, decode_reply
from schemas.reply_log import ReplyLog
from schemas.trace_ids import TraceIds
from worker.admission_gate import AdmissionGate
from worker.call import ServerConfig
from worker.config import WorkerConfig
from worker.engine.fakes import ByteDetokenizer, FakeRunner
from worker.engine.outputs import StepOutcome, StepPlan, StepRecord
from worker.engine.scheduler import Scheduler, SchedulerConfig
from worker.engine.step_model import StepModel
from worker.levels import make_admission, make_queue, tier_policies
from worker.loop import EngineLoop
from worker.measured_sink import MeasuredSink
from worker.metrics import Metrics
from worker.prepare import ModelFacts
from worker.server import RequestServer
from worker.telemetry import Telemetry
from worker.tracing import Tracing
from worker.transport.memory import MemoryBroker, MemoryRecord, MemorySink, MemorySource

LANE = "prompts.standard"
EOS = 0
VOCAB = 256


class Bytes:
    """A tokenizer of bytes. EOS is never part of a prompt."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def render(self, messages: list[dict[str, str]]) -> list[int]:
        return self.encode("".join(m["content"] for m in messages))

    def new_detokenizer(self) -> ByteDetokenizer:
        return ByteDetokenizer()


async def until(condition: Callable[[], bool], timeout: float = 10) -> None:
    """Lets everybody run until it holds."""
    async with asyncio.timeout(timeout):
        while not condition():
            await asyncio.sleep(0)


async def turns(number: int) -> None:
    """Lets everybody run so many turns of the event loop."""
    for _ in range(number):
        await asyncio.sleep(0)


async def vanish(server: RequestServer) -> None:
    """The worker is gone: nothing of what it serves goes on, and it writes nothing more."""
    serving = [*server._calls.values(), *server._burials]
    for task in serving:
        task.cancel()
    await asyncio.gather(*serving, return_exceptions=True)


def holds_nothing(server: RequestServer) -> bool:
    """No reservation, nothing queued, nobody waiting, no seat and no block."""
    stats = server.engine.scheduler.stats()
    engine_is_idle = stats.num_running == stats.num_waiting == stats.num_blocks_used == 0
    return engine_is_idle and not len(server.admission.quotas) and not len(server.admission) + server.gate.num_delayed


class Alarm:
    """A call that waits for its time."""

    def __init__(self, function: Callable[[], None]) -> None:
        self.function = function

    def cancel(self) -> None:
        self.function = lambda: None


class WallClock:
    """Milliseconds since the broker's epoch, and seconds for the engine, moved by hand."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._alarms: list[tuple[float, int, Alarm]] = []
        self._numbers = itertools.count()

    def now(self) -> float:
        return self.seconds

    def call_at(self, at: float, function: Callable[[], None]) -> Alarm:
        alarm = Alarm(function)
        heapq.heappush(self._alarms, (at, next(self._numbers), alarm))
        return alarm

    def move_to(self, seconds: float) -> None:
        """Makes the calls that are due by then, each at its time."""
        while self._alarms and self._alarms[0][0] <= seconds:
            self.seconds, _, alarm = heapq.heappop(self._alarms)
            alarm.function()
        self.seconds = seconds


class StepRunner(FakeRunner):
    """A FakeRunner that fails when told to, and remembers the seeds that it was given."""

    failing: tuple[int, ...] = ()  # step numbers

    def __init__(self, config: SchedulerConfig, vocab_size: int) -> None:
        super().__init__(config, vocab_size)
        self.seeds: list[int] = []
        self.clock: WallClock | None = None  # a step takes a millisecond of it

    def execute(self, plan: StepPlan) -> StepOutcome:
        self.seeds += [new.sampling.seed for new in plan.new]
        if self.clock is not None:
            self.clock.seconds += 0.001
        if plan.step in self.failing:
            raise RuntimeError("the model broke")
        return super().execute(plan)


class _Sink(MemorySink):
    """Remembers what the server will write to no more."""

    def __init__(self, broker: MemoryBroker) -> None:
        super().__init__(broker)
        self.forgotten: list[str] = []

    def forget(self, address: ReplyAddress) -> None:
        self.forgotten.append(address.topic)


class World:
    """One lane, its broker, and workers that come and go.

    `publish` puts a request on the lane, `worker()` runs a worker, `answer` reads a reply log by the reader rule.

    Args:
        step_model: how long steps take, for admission (default: one that has seen none).
        max_outstanding: records that are taken in and not done.
        traced: every span goes to `spans`, one for each step among them; each step takes a millisecond.
        settings: of WorkerConfig, for tiers and tenants.
    """

    def __init__(
        self,
        *,
        max_num_seqs: int = 8,
        num_blocks: int = 512,
        num_host_blocks: int = 0,
        step_model: StepModel | None = None,
        traced: bool = False,
        max_outstanding: int | None = None,
        **settings: object,
    ) -> None:
        self.broker = MemoryBroker()
        for topic in (LANE, "prompts.dlq", "usage"):
            self.broker.create(topic)
        self.step_model = step_model or StepModel()
        self.settings = WorkerConfig(model="tiny", max_num_batched_tokens=64, **settings)
        self.config = SchedulerConfig(
            num_blocks=num_blocks,
            block_size=4,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=64,
            max_model_len=256,
            num_host_blocks=num_host_blocks,
            preemption=self.settings.preemption,
            tiers=tier_policies(self.settings),
        )
        self.clock = WallClock()
        self.steps: list[StepRecord] = []
        self.source = MemorySource(
            self.broker, "standard", LANE, lambda: self.clock.seconds * 1000, max_outstanding=max_outstanding
        )
        self.sink = _Sink(self.broker)
        self.spans = InMemorySpanExporter()
        provider = TracerProvider(shutdown_on_exit=False, id_generator=TraceIds())
        provider.add_span_processor(SimpleSpanProcessor(self.spans))
        self._tracer = provider.get_tracer("test") if traced else None

    def _telemetry(self, name: str) -> Telemetry:
        metrics = Metrics(name, self.settings.tiers, self.settings.tenants, self.settings.metrics_max_tenants)
        metrics.model_loaded("fake", 64, lambda: (0.001, 0.002), lambda num_tokens: num_tokens / 1000)
        return Telemetry(metrics, Tracing(self._tracer, self.clock, "fake", step_share=1.0))

    def publish(
        self,
        request_id: str,
        *,
        topic: bool = True,
        headers: Sequence[tuple[str, bytes]] = (),
        raw: bytes | None = None,
        **body: object,
    ) -> None:
        if topic:
            self.broker.create(f"replies.{request_id}")
        fields = {"prompt": "Hello", "max_tokens": 12, "temperature": 0, "ignore_eos": True} | body
        value = json.dumps(fields).encode() if raw is None else raw
        named = [("correlation_id", request_id.encode()), ("reply_to", f"replies.{request_id}".encode())]
        kind = [("content-type", b"application/json")]
        self.broker.topics[LANE][0].append(MemoryRecord(b"key", value, [*kind, *named, *headers]))

    @contextlib.asynccontextmanager
    async def worker(self, name: str = "w1", model: str = "fake"):
        """A worker that serves until the block is left; then it dies without a word."""
        engine_config, settings = self.config, self.settings
        runner = StepRunner(engine_config, VOCAB)
        runner.clock = self.clock if self._tracer is not None else None
        queue = make_queue(settings, self.step_model)
        telemetry = self._telemetry(name)
        engine = EngineLoop(Scheduler(engine_config, queue), runner, self.clock, self.steps.append, observer=telemetry)
        admission = make_admission(settings, self.step_model, queue, lambda: (0, 0))
        gate = AdmissionGate(admission, self.clock, self.clock.call_at)
        async with contextlib.AsyncExitStack() as stack:
            tasks = await stack.enter_async_context(asyncio.TaskGroup())
            server = RequestServer(
                ServerConfig(
                    worker=name,
                    tiers=settings.tiers,
                    tiers_of=settings.tiers_of,
                    priority_class=settings.priority_class,
                    reply_prefixes=("replies.",),
                    forbidden_topics=frozenset([LANE, "prompts.dlq", "usage"]),
                    default_reply_topic="replies.default",
                    dlq_topic="prompts.dlq",
                    usage_topic="usage",
                    max_fruitless_attempts=settings.max_fruitless_attempts,
                ),
                ModelFacts(model, VOCAB, engine_config.max_model_len, (EOS,), Bytes()),
                engine,
                gate,
                MeasuredSink(self.sink, telemetry.metrics),
                {"standard": self.source},
                tasks,
                wall_ms=lambda: self.clock.seconds * 1000,
                telemetry=telemetry,
            )
            running = tasks.create_task(engine.run())
            server.runner = runner  # for tests that break it
            server.engine = engine
            server.gate, server.admission = gate, admission
            server.metrics = telemetry.metrics
            try:
                yield server
            finally:
                await vanish(server)
                engine.stop()
                await running

    def deliver(self, server: RequestServer) -> None:
        """Delivers what was published."""
        for delivery in self.source.deliveries():
            server.deliver(delivery)

    async def serve(self, server: RequestServer, timeout: float = 10) -> None:
        """Delivers what was published and waits until nothing is in service."""
        self.deliver(server)
        await until(lambda: not server.num_calls, timeout)

    def records(self, topic: str) -> Iterator[tuple[int, ReplyRecord]]:
        for offset, record in enumerate(self.broker.topics[topic][0]):
            reply = decode_reply(record.headers, record.value)
            if reply is not None:
                yield offset, reply

    def answer(self, request_id: str) -> ReplyLog:
        seen = ReplyLog()
        for offset, record in self.records(f"replies.{request_id}"):
            seen.feed(offset, record)
        return seen
