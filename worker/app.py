"""The composition root: builds the worker from its configuration and runs it until it is told to stop."""

import asyncio
import json
import signal
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import asdict

import structlog

from schemas.topics import DEFAULT_LANE_PREFIX, DEFAULT_TIERS
from worker.config import WorkerConfig
from worker.engine.outputs import StepRecord
from worker.engine.protocols import Runner
from worker.engine.scheduler import Scheduler
from worker.engine.step_model import StepModel
from worker.loop import EngineLoop
from worker.prepare import ModelFacts
from worker.server import RequestServer, ServerConfig
from worker.transport.kafka_connections import KafkaConnections, KafkaUnavailable
from worker.transport.kafka_control import KafkaControl
from worker.transport.kafka_lane import KafkaLane
from worker.transport.kafka_replies import KafkaReplies

LEAVE_S = 10.0  # for the last commits; a broker that is away does not hold the end up

log = structlog.get_logger(__name__)


class MonotonicClock:
    def now(self) -> float:
        return time.monotonic()


class Worker:
    """One worker process: a model, its engine and its lanes.

    Args:
        on_ready: called once every lane consumes.
    """

    def __init__(
        self,
        config: WorkerConfig,
        model: ModelFacts,
        runner: Runner,
        scheduler: Scheduler,
        step_model: StepModel | None = None,
        on_ready: Callable[[], None] = lambda: None,
    ) -> None:
        self._config = config
        self._model = model
        self._on_ready = on_ready
        self._stop = asyncio.Event()
        on_step = self._log_step if config.step_log else None
        self.engine = EngineLoop(scheduler, runner, MonotonicClock(), on_step, step_model)

    def stop(self) -> None:
        """Drains, then ends `run`."""
        self._stop.set()

    async def run(self) -> None:
        """Serves until `stop`. Raises KafkaUnavailable, and what makes going on impossible."""
        config = self._config
        async with AsyncExitStack() as stack:
            connections = await stack.enter_async_context(_connections(config))
            await _check_topics(config, connections)
            replies = KafkaReplies(connections, config.max_record_bytes)
            stack.push_async_callback(replies.close)
            async with asyncio.TaskGroup() as tasks:
                await self._serve(connections, replies, tasks)

    async def _serve(self, connections: KafkaConnections, replies: KafkaReplies, tasks: asyncio.TaskGroup) -> None:
        config = self._config
        lanes: dict[str, KafkaLane] = {}
        server = RequestServer(self._server_config(), self._model, self.engine, replies, lanes, tasks)
        for tier, topic in config.lanes.items():
            lanes[tier] = KafkaLane(
                tier,
                topic,
                connections.lane_consumer(f"{config.group_prefix}{topic}", f"carousel-worker-{config.worker}-{tier}"),
                deliver=server.deliver,
                lost=server.drop_lost,
                committed=connections.committed,
                max_outstanding=config.max_outstanding,
                max_outstanding_bytes=config.max_outstanding_bytes,
                commit_interval=config.commit_interval,
            )
        control = KafkaControl(connections, config.control_topic, server.cancel)
        tasks.create_task(self.engine.run(), name="engine")
        tasks.create_task(control.run(), name="control")
        consuming = [tasks.create_task(lane.run(), name=f"lane {tier}") for tier, lane in lanes.items()]
        ready = tasks.create_task(self._announce(lanes), name="ready")

        await self._stop.wait()
        ready.cancel()
        log.info("worker.draining", requests=server.num_calls, timeout=config.drain_timeout)
        for lane in lanes.values():
            lane.drain()
        left = await server.drain(config.drain_timeout)
        for lane in lanes.values():
            lane.stop()
        control.stop()
        _, stuck = await asyncio.wait(consuming, timeout=LEAVE_S)  # each commits and leaves its group
        for lane_task in stuck:
            lane_task.cancel()
        self.engine.stop()
        log.info("worker.stopped", handed_over=left, producer_topics=connections.num_producer_topics)

    async def _announce(self, lanes: dict[str, KafkaLane]) -> None:
        for lane in lanes.values():
            await lane.assigned.wait()
        log.info("worker.ready", worker=self._config.worker, model=self._model.name, lanes=self._config.lanes)
        self._on_ready()

    def _server_config(self) -> ServerConfig:
        config = self._config
        return ServerConfig(
            worker=config.worker,
            tiers=config.tiers,
            priority_class=config.priority_class,
            reply_prefixes=(config.reply_prefix,),
            forbidden_topics=config.forbidden_topics,
            default_reply_topic=config.default_reply_topic,
            dlq_topic=config.dlq_topic,
            usage_topic=config.usage_topic,
        )

    def _log_step(self, record: StepRecord) -> None:
        assert self._config.step_log is not None
        with self._config.step_log.open("a") as file:
            file.write(json.dumps(asdict(record)) + "\n")


async def check_kafka(config: WorkerConfig) -> None:
    """Raises KafkaUnavailable when the cluster cannot be used as configured, or topics are missing."""
    async with _connections(config) as connections:
        await _check_topics(config, connections)


def _connections(config: WorkerConfig) -> KafkaConnections:
    return KafkaConnections(
        config,
        client_id=f"carousel-worker-{config.worker}",
        request_timeout_ms=config.request_timeout_ms,
        session_timeout_ms=config.session_timeout_ms,
        rebalance_timeout_ms=config.rebalance_timeout_ms,
    )


async def _check_topics(config: WorkerConfig, connections: KafkaConnections) -> None:
    needed = [*config.lanes.values(), config.control_topic, config.dlq_topic, config.usage_topic]
    counts = await asyncio.gather(*map(connections.partitions_of, needed))
    missing = [topic for topic, count in zip(needed, counts, strict=True) if not count]
    if missing:
        command = f"carousel topics create --bootstrap {config.bootstrap}"
        if config.lane_prefix != DEFAULT_LANE_PREFIX:
            command += f" --lane-prefix {config.lane_prefix}"
        if list(config.tiers) != list(DEFAULT_TIERS):
            command += "".join(f" --tier {name}" for name in config.tiers)
        raise KafkaUnavailable(f"these topics do not exist: {', '.join(missing)}. Create them with: {command}")


async def run_until_signal(worker: Worker) -> None:
    """Runs a worker; SIGTERM and SIGINT drain it, a second one ends it at once."""
    loop, running = asyncio.get_running_loop(), asyncio.current_task()
    assert running is not None
    num_signals = 0

    def on_signal() -> None:
        nonlocal num_signals
        num_signals += 1
        if num_signals == 1:
            worker.stop()
        else:
            running.cancel()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    try:
        await worker.run()
    except asyncio.CancelledError:
        log.warning("worker.stopped_at_once")
