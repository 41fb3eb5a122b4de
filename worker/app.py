"""The composition root: builds the worker from its configuration and runs it until it is told to stop."""

import asyncio
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from functools import partial

import structlog
from opentelemetry.trace import Tracer

from schemas.topics import DEFAULT_LANE_PREFIX, DEFAULT_TIERS, reply_topic
from worker.admission_gate import AdmissionGate
from worker.call import ServerConfig
from worker.config import WorkerConfig
from worker.engine.admission import Admission
from worker.engine.outputs import StepRecord
from worker.engine.protocols import Runner
from worker.engine.scheduler import Scheduler
from worker.engine.step_model import StepModel
from worker.health import Health
from worker.loop import EngineLoop
from worker.measured_sink import MeasuredSink
from worker.metrics import Metrics
from worker.prepare import ModelFacts
from worker.reaper import Reaper
from worker.server import RequestServer
from worker.snapshots import Snapshots
from worker.supervised import SupervisorLink
from worker.telemetry import Telemetry
from worker.tracing import Tracing
from worker.transport.kafka_connections import KafkaConnections, KafkaUnavailable
from worker.transport.kafka_control import KafkaControl
from worker.transport.kafka_lane import KafkaLane
from worker.transport.kafka_replies import KafkaReplies
from worker.watchdog import LaneWatchdog

READY_POLL_S = 0.05
AT_ONCE_S = 4.0  # after a second signal; what hangs then is left as a crash would leave it
ENDS_EVERY_S = 5.0
LEAVE_S = 10.0  # for the last commits; a broker that is away does not hold the end up

log = structlog.get_logger(__name__)


class MonotonicClock:
    def now(self) -> float:
        return time.monotonic()


@dataclass(frozen=True, slots=True)
class Serving:
    """A worker that serves, for whoever looks on from another thread."""

    engine: EngineLoop
    lanes: Mapping[str, KafkaLane]
    server: RequestServer


class Worker:
    """One worker process: a model, its engine and its lanes.

    Args:
        on_ready: called once every lane consumes.
        health: is told what there is to look at.
        joined: called with (group, member id) whenever this worker is a member of a lane's group.
        metrics: to count in.
        on_serving: told what there is to look at, once it serves.
        tracer: None where nothing is traced.
        snapshots: is told of steps and finished requests, for the live page.
    """

    def __init__(
        self,
        config: WorkerConfig,
        model: ModelFacts,
        runner: Runner,
        scheduler: Scheduler,
        step_model: StepModel,
        admission: Admission,
        on_ready: Callable[[], None] = lambda: None,
        health: Health | None = None,
        joined: Callable[[str, str], None] = lambda group, member: None,
        metrics: Metrics | None = None,
        on_serving: Callable[["Serving"], None] = lambda serving: None,
        tracer: Tracer | None = None,
        snapshots: Snapshots | None = None,
    ) -> None:
        self._config = config
        self._model = model
        self._on_ready = on_ready
        self._stop = asyncio.Event()
        self._drain_timeout = config.drain_timeout
        on_step = self._log_step if config.step_log else None
        self.metrics = metrics or Metrics(config.worker, config.tiers)
        clock = MonotonicClock()
        self._telemetry = Telemetry(self.metrics, self._tracing(tracer, clock), snapshots)
        self.engine = EngineLoop(scheduler, runner, clock, on_step, step_model, self._telemetry)
        self._on_serving = on_serving
        self._gate = AdmissionGate(admission, self.engine.clock)
        self.share = 0.0  # of every limit of the deployment, which this worker enforces
        self.num_shares = 0  # how often that was renewed
        self.lanes: dict[str, KafkaLane] = {}  # from `run` on
        self._joined = joined
        self._health = health or Health(config.stuck_after)
        self._health.model_loaded(self.engine)
        self._health.monitor.tell = self.metrics.loop_late

    def stop(self, drain_timeout: float | None = None) -> None:
        """Drains, then ends `run`. drain_timeout: seconds, in place of the configured ones."""
        if drain_timeout is not None:
            self._drain_timeout = drain_timeout
        self._stop.set()

    async def run(self) -> None:
        """Serves until `stop`. Raises KafkaUnavailable, and what makes going on impossible."""
        config = self._config
        async with AsyncExitStack() as stack:
            connections = await stack.enter_async_context(_connections(config))
            num_partitions = await _check_topics(config, connections)
            replies = KafkaReplies(connections, config.max_record_bytes)
            stack.push_async_callback(replies.close)
            async with asyncio.TaskGroup() as tasks:
                await self._serve(connections, num_partitions, replies, tasks)

    async def _serve(
        self,
        connections: KafkaConnections,
        num_partitions: dict[str, int],
        replies: KafkaReplies,
        tasks: asyncio.TaskGroup,
    ) -> None:
        config = self._config
        lanes = self.lanes
        server = RequestServer(
            self._server_config(),
            self._model,
            self.engine,
            self._gate,
            MeasuredSink(replies, self.metrics),
            lanes,
            tasks,
            telemetry=self._telemetry,
        )

        def new_lane(tier: str) -> KafkaLane:
            topic, client_id = config.lanes[tier], f"carousel-worker-{config.worker}-{tier}"
            return KafkaLane(
                tier,
                topic,
                connections.lane_consumer(f"{config.group_prefix}{topic}", client_id),
                deliver=server.deliver,
                lost=server.drop_lost,
                shared=partial(self._renew_share, tier),
                committed=connections.committed,
                partitions_of=connections.partitions_of,
                num_partitions=num_partitions[topic],
                max_outstanding=config.max_outstanding,
                max_outstanding_bytes=config.max_outstanding_bytes,
                commit_interval=config.commit_interval,
                joined=self._joined,
            )

        def replaced(tier: str) -> None:
            self.metrics.lane_replaced(tier)
            server.drop_lost(tier)

        lanes |= {tier: new_lane(tier) for tier in config.lanes}
        silence_limit = (config.rebalance_timeout_ms + config.session_timeout_ms) / 1000
        watchdog = LaneWatchdog(lanes, new_lane, replaced, connections.reachable, silence_limit=silence_limit)
        self._health.consuming(lanes, watchdog)
        self._on_serving(Serving(self.engine, lanes, server))
        control = KafkaControl(connections, config.control_topic, server.cancel)
        tasks.create_task(self.engine.run(), name="engine")
        tasks.create_task(control.run(), name="control")
        consuming = [tasks.create_task(watchdog.keep(tier), name=f"lane {tier}") for tier in lanes]
        ready = tasks.create_task(self._announce(lanes), name="ready")
        side = self._side_tasks(lanes, tasks)

        await self._stop.wait()
        ready.cancel()
        self._health.draining = True
        log.info("worker.draining", requests=server.num_calls, timeout=self._drain_timeout)
        for lane in lanes.values():
            lane.drain()
        left = await server.drain(self._drain_timeout)
        for lane in lanes.values():
            lane.stop()
        control.stop()
        _, stuck = await asyncio.wait(consuming, timeout=LEAVE_S)  # each commits and leaves its group
        for task in [*stuck, *side]:
            task.cancel()
        self.engine.stop()
        log.info("worker.stopped", handed_over=left, producer_topics=connections.num_producer_topics)

    def _renew_share(self, tier: str) -> None:
        """Limits are of the deployment: this worker enforces its part of all lanes' partitions."""
        lanes = self.lanes
        self.metrics.rebalanced(tier)
        owned = sum(len(lane.partitions) for lane in lanes.values())
        partitions = sum(lane.num_partitions for lane in lanes.values())
        self.share = owned / partitions
        self.num_shares += 1
        self._gate.share(self.share)
        self.engine.wake()  # tenants at their seat limit may have more now
        log.info("worker.share", owned=owned, partitions=partitions, share=round(self.share, 4))

    def _side_tasks(self, lanes: dict[str, KafkaLane], tasks: asyncio.TaskGroup) -> list[asyncio.Task[None]]:
        """What goes on beside the service, and is cancelled at its end."""
        side = [tasks.create_task(self._health.monitor.run(), name="loop monitor")]
        if self._config.metrics_port is not None:
            side.append(tasks.create_task(self._look_for_ends(lanes), name="lane ends"))
        config, first = self._config, next(iter(lanes))
        if config.reap_after is not None:
            reaper = Reaper(
                config,
                config.reply_prefix,
                config.lane_prefix,
                config.reap_after,
                has_lease=lambda: 0 in lanes[first].partitions and not self._health.draining,
            )
            side.append(tasks.create_task(reaper.run(), name="reaper"))
        return side

    async def _look_for_ends(self, lanes: dict[str, KafkaLane]) -> None:
        """For the depth of lanes that are paused."""
        while True:
            await asyncio.sleep(ENDS_EVERY_S)
            await asyncio.gather(*(lane.look_for_ends() for lane in lanes.values()))

    async def _announce(self, lanes: dict[str, KafkaLane]) -> None:
        while not all(lane.assigned.is_set() for lane in lanes.values()):  # a lane may be replaced meanwhile
            await asyncio.sleep(READY_POLL_S)
        log.info("worker.ready", worker=self._config.worker, model=self._model.name, lanes=self._config.lanes)
        self._on_ready()

    def _tracing(self, tracer: Tracer | None, clock: MonotonicClock) -> Tracing:
        config = self._config
        return Tracing(
            tracer,
            clock,
            self._model.name,
            reply_template=reply_topic("{correlation_id}", config.reply_prefix),
            group_of=lambda topic: f"{config.group_prefix}{topic}",
            step_share=config.trace_steps,
        )

    def _server_config(self) -> ServerConfig:
        config = self._config
        return ServerConfig(
            worker=config.worker,
            tiers=config.tiers,
            tiers_of=config.tiers_of,
            priority_class=config.priority_class,
            reply_prefixes=(config.reply_prefix,),
            forbidden_topics=config.forbidden_topics,
            default_reply_topic=config.default_reply_topic,
            dlq_topic=config.dlq_topic,
            usage_topic=config.usage_topic,
            max_fruitless_attempts=config.max_fruitless_attempts,
        )

    def _log_step(self, record: StepRecord) -> None:
        assert self._config.step_log is not None
        with self._config.step_log.open("a") as file:
            file.write(json.dumps(asdict(record)) + "\n")


async def check_kafka(config: WorkerConfig) -> None:
    """Raises KafkaUnavailable when the cluster cannot be used as configured, or topics are missing."""
    async with _connections(config, warns=False) as connections:  # the worker's own will say it
        await _check_topics(config, connections)


def _connections(config: WorkerConfig, *, warns: bool = True) -> KafkaConnections:
    return KafkaConnections(
        config,
        client_id=f"carousel-worker-{config.worker}",
        request_timeout_ms=config.request_timeout_ms,
        session_timeout_ms=config.session_timeout_ms,
        rebalance_timeout_ms=config.rebalance_timeout_ms,
        warns=warns,
    )


async def _check_topics(config: WorkerConfig, connections: KafkaConnections) -> dict[str, int]:
    """How many partitions each topic has. Raises KafkaUnavailable for those that are missing."""
    needed = [*config.lanes.values(), config.control_topic, config.dlq_topic, config.usage_topic]
    counts = await connections.count_partitions(needed)
    missing = [topic for topic, count in counts.items() if not count]
    if missing:
        command = f"carousel topics create --bootstrap {config.bootstrap}"
        if config.lane_prefix != DEFAULT_LANE_PREFIX:
            command += f" --lane-prefix {config.lane_prefix}"
        if list(config.tiers) != list(DEFAULT_TIERS):
            command += "".join(f" --tier {name}" for name in config.tiers)
        raise KafkaUnavailable(f"these topics do not exist: {', '.join(missing)}. Create them with: {command}")
    return counts


async def run_until_signal(worker: Worker, link: SupervisorLink | None = None) -> None:
    """Runs a worker; SIGTERM and SIGINT drain it, a second one ends it at once, with status 128 + signal.

    link: when the supervisor has died, whoever started it may start another: the work is handed over without a drain.
    """
    loop, running = asyncio.get_running_loop(), asyncio.current_task()
    assert running is not None
    received: list[int] = []

    def on_signal(number: int) -> None:
        received.append(number)
        if len(received) == 1:
            worker.stop(0.0 if link is not None and link.orphaned else None)
            return
        by_force = threading.Timer(AT_ONCE_S, os._exit, [128 + number])  # a step that hangs holds the loop up
        by_force.daemon = True
        by_force.start()
        running.cancel()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)
    try:
        await worker.run()
    except asyncio.CancelledError:
        if received and not running.cancelling():
            # Nobody cancelled us: a client of aiokafka awaits its own cancelled task when its broker goes away.
            log.warning("worker.closed_without_broker")
            return
        log.warning("worker.stopped_at_once")
        os._exit(128 + received[-1])  # all is closed; what Python and torch take apart at an exit takes a second
