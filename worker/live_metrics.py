"""The figures that are read off the worker's state when somebody asks for /metrics (docs/metrics.md).

Asked from another thread than the event loop's: everything here is read in one piece, and nothing is changed.
"""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from worker.app import Serving
from worker.call import Call
from worker.engine.outputs import EngineStats
from worker.health import Health
from worker.server import MAX_AGE_S


class LiveMetrics(Collector):
    """A collector of `registry`. Until `watch` it only tells that the worker is not ready."""

    def __init__(self, registry: CollectorRegistry, health: Health) -> None:
        self._registry = registry
        self._health = health
        self._watched: Serving | None = None
        registry.register(self)

    def watch(self, watched: Serving) -> None:
        self._watched = watched

    def render(self, accept: str) -> tuple[bytes, str]:
        """The whole page, and its content type, for a request with that `Accept` header. For any thread."""
        encode, content_type = choose_encoder(accept)
        return encode(self._registry), content_type

    def describe(self) -> list[Metric]:
        return []  # their names are not known to be others' before somebody asks

    def collect(self) -> Iterator[Metric]:
        health, watched = self._health, self._watched
        yield _gauge("llm_worker_ready", "As /readyz.", float(not health.not_ready()))
        yield _gauge("llm_worker_draining", "It takes nothing more in.", float(health.draining))
        yield _gauge("llm_loop_lag_worst_seconds", "Of the last minute.", health.monitor.worst_lag)
        if watched is not None:
            stats, config = watched.engine.scheduler.stats(), watched.engine.scheduler.config
            yield from _engine(stats, config.max_seats)
            yield from self._queues(watched, stats)
            yield from self._offsets(watched)

    def _queues(self, watched: Serving, stats: EngineStats) -> Iterator[Metric]:
        calls, now = watched.server.calls, watched.engine.clock.now()
        in_service = GaugeMetricFamily("llm_requests_in_service", "Taken in and not over.", labels=["tier"])
        running = GaugeMetricFamily("llm_sequences_running", "With a seat.", labels=["tier"])
        waiting = GaugeMetricFamily("llm_sequences_waiting", "In the engine, without a seat.", labels=["tier"])
        depth = GaugeMetricFamily("llm_queue_depth", "Published and without a seat so far.", labels=["tier"])
        oldest = GaugeMetricFamily("llm_queue_oldest_age_seconds", "Of the oldest of those.", labels=["tier"])
        queued = GaugeMetricFamily("llm_queue_prompt_tokens", "Admitted and not started.", labels=["tier"])
        partitions = GaugeMetricFamily("llm_lane_partitions", "Assigned to this worker.", labels=["tier"])
        for tier, lane in list(watched.lanes.items()):
            ours = [call for call in calls if call.delivery.lane == tier]
            unseated = [call for call in ours if not _has_started(call)]
            in_service.add_metric([tier], len(ours))
            running.add_metric([tier], stats.running_by_lane.get(tier, 0))
            waiting.add_metric([tier], stats.waiting_by_lane.get(tier, 0))
            depth.add_metric([tier], len(unseated) + sum(lane.lags().values()))
            ages = [min(age, MAX_AGE_S) for age in lane.unread_ages().values()]  # a producer's clock may be wrong
            oldest.add_metric([tier], max([*ages, *(now - call.arrival for call in unseated)], default=0.0))
            queued.add_metric([tier], watched.server.gate.queued_tokens(tier))
            partitions.add_metric([tier], len(lane.partitions))
        yield from (in_service, running, waiting, depth, oldest, queued, partitions)
        yield _gauge("llm_requests_delayed", "Wait for their tenant's quota.", watched.server.gate.num_delayed)
        yield _gauge("llm_worker_share", "Of every tenant's limit.", watched.server.gate.fraction)

    def _offsets(self, watched: Serving) -> Iterator[Metric]:
        labels, now = ["tier", "partition"], watched.engine.clock.now()
        lag = GaugeMetricFamily("llm_lane_lag", "In the partition and not taken in.", labels=labels)
        gap = GaugeMetricFamily("llm_offsets_gap", "From the commit to the next expected offset.", labels=labels)
        age = GaugeMetricFamily("llm_offsets_head_age_seconds", "In service, of the oldest.", labels=labels)
        heads: dict[tuple[str, int], Call] = {}
        for call in watched.server.calls:
            key, offset = (call.delivery.lane, call.delivery.source.partition), call.delivery.source.offset
            if key not in heads or offset < heads[key].delivery.source.offset:
                heads[key] = call
        for tier, lane in list(watched.lanes.items()):
            for partition, records in lane.lags().items():
                lag.add_metric([tier, str(partition)], records)
            for partition, records in lane.gaps().items():
                gap.add_metric([tier, str(partition)], records)
                head = heads.get((tier, partition))
                age.add_metric([tier, str(partition)], 0.0 if head is None else now - head.taken_in)
        yield from (lag, gap, age)


def _engine(stats: EngineStats, num_seats: int) -> Iterator[Metric]:
    yield _gauge("llm_seats", "How many may run at once.", num_seats)
    blocks = GaugeMetricFamily("llm_kv_blocks", "By what is in them.", labels=["pool", "state"])
    free = stats.num_blocks - stats.num_blocks_used - stats.num_blocks_cached
    for state, count in (
        ("active", stats.num_blocks_used - stats.num_blocks_draining),
        ("draining", stats.num_blocks_draining),
        ("cached", stats.num_blocks_cached),
        ("free", free),
    ):
        blocks.add_metric(["device", state], count)
    blocks.add_metric(["host", "swapped"], stats.num_host_blocks_used)
    blocks.add_metric(["host", "free"], stats.num_host_blocks - stats.num_host_blocks_used)
    yield blocks
    for name, text, total in (
        ("llm_failed_copies", "Computed again.", stats.total_failed_copies),
        ("llm_recomputed_tokens", "Computed before, and lost.", stats.total_recomputed_tokens),
        ("llm_prefix_hit_tokens", "Of prompts, found computed.", stats.total_cached_tokens),
        ("llm_prefix_lookup_tokens", "Of prompts that were looked up.", stats.total_new_prompt_tokens),
    ):
        yield CounterMetricFamily(name, text, value=total)


def _has_started(call: Call) -> bool:
    """It had a seat, or needs none: it is refused."""
    return call.refusal is not None or (call.events is not None and call.events.admitted_at is not None)


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(name, text, value=value)
