"""The figures that the worker counts as it goes, under the names of docs/metrics.md. What is read off its state when
somebody asks is in live_metrics.py.

With Prometheus' own client library: the OpenTelemetry SDK's exporter for it is a beta that drops exemplars, and an
observation costs several times as much. A collector scrapes this page as well as Prometheus does.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, disable_created_metrics
from prometheus_client.process_collector import ProcessCollector

from schemas.reasons import DeadLetterReason, ErrorCode, FinishReason
from schemas.records import End
from schemas.topics import Tier
from worker.engine.outputs import EngineEvent, StepRecord, TokenEvent
from worker.loop import StepTimes

OTHER = "other"  # the tenants beyond the bound
MAX_RECOMPUTING = 1024

# Of the semantic conventions; ours go on to two minutes, because the wait in Kafka counts.
TTFT_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 30, 60, 120)
TPOT_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5)
REQUEST_S = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92, 163.84)
MESSAGING_S = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10)
PROCESS_S = (*MESSAGING_S, 30, 60, 120)
STEP_S = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10)
LAG_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 10)
BATCH = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)

_OPERATION = ("gen_ai_operation_name", "gen_ai_provider_name", "gen_ai_request_model")
_DESTINATION = ("messaging_system", "messaging_destination_name")
_OURS = (ErrorCode.OVERLOADED, ErrorCode.DEADLINE_UNREACHABLE, ErrorCode.INTERNAL)  # faults that are not the caller's
_PARTS = ("schedule", "execute", "copy", "apply", "publish")


class TenantLabels:
    """Bounds the label `tenant`: whoever publishes may name any tenant, and each would be a series for ever."""

    def __init__(self, configured: Iterable[str], most: int) -> None:
        self._most = most
        self._known = dict.fromkeys(list(configured)[:most])

    @property
    def known(self) -> tuple[str, ...]:
        """Those with a label of their own, and OTHER."""
        return (*self._known, OTHER)

    def label(self, tenant: str) -> str:
        """The tenant, or OTHER when there are too many. The first come are kept."""
        if tenant not in self._known:
            if len(self._known) >= self._most:
                return OTHER
            self._known[tenant] = None
        return tenant


class Metrics:
    """Counters and histograms of one worker process. A StepObserver. All methods are called on the event loop.

    Args:
        worker: its name.
        tiers: with their targets.
        tenants: of the configuration; they have a label of their own first.
        max_tenants: with a label of their own; the rest share one.
        reply_template: in place of the name of a reply topic.
    """

    def __init__(
        self,
        worker: str,
        tiers: Mapping[str, Tier],
        tenants: Iterable[str] = (),
        max_tenants: int = 50,
        reply_template: str = "replies.{correlation_id}",
    ) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # a second series for each: when the first began
        self.registry = CollectorRegistry(auto_describe=True)
        self._worker = worker
        self._tiers = tiers
        self._tenants = TenantLabels(tenants, max_tenants)
        self._reply_template = reply_template
        self._model = ""
        self._copy_seconds: Callable[[], tuple[float, float]] = lambda: (0.0, 0.0)
        self._prefill_seconds: Callable[[int], float] = lambda num_tokens: 0.0
        self._block_bytes = 0
        self._recomputing: dict[tuple[str, int], float | None] = {}  # (request id, choice) -> when it took its seat
        ProcessCollector(registry=self.registry)
        self._make_request_metrics()
        self._make_engine_metrics()
        self._make_kafka_metrics()
        self._begin_at_zero()

    def _make_request_metrics(self) -> None:
        timing = ("tier", *_OPERATION)
        self._duration = self._histogram(
            "gen_ai_server_request_duration_seconds", "From publishing to the end.", REQUEST_S, *timing, "error_type"
        )
        self._ttft = self._histogram(
            "gen_ai_server_time_to_first_token_seconds", "From publishing to the first token.", TTFT_S, *timing
        )
        self._tpot = self._histogram(
            "gen_ai_server_time_per_output_token_seconds", "Between tokens, after the first.", TPOT_S, *timing
        )
        self._queue_wait = self._histogram(
            "llm_queue_wait_seconds", "From publishing to the first seat.", TTFT_S, "tier"
        )
        self._requests = self._counter("llm_requests", "Services that are over.", "tier", "outcome", "finish_reason")
        self._refused = self._counter("llm_requests_refused", "Answered with an error.", "tier", "code")
        self._slo = self._counter("llm_slo_requests", "Answered requests by promise.", "tier", "slo", "met")
        self._goodput = self._counter("llm_goodput_tokens", "Output of requests that met every promise.", "tier")
        targets = Gauge("llm_slo_target_seconds", "Configured targets.", ["tier", "slo"], registry=self.registry)
        for name, tier in self._tiers.items():
            for slo, target in (("ttft", tier.ttft_ms), ("tpot", tier.tpot_ms)):
                if target is not None:
                    targets.labels(name, slo).set(target / 1000)
        self._tokens = self._counter("llm_tokens", "As in the usage records.", "tier", "type")
        self._tenant_tokens = self._counter("llm_tenant_tokens", "As in the usage records.", "tenant", "type")
        self._tenant_requests = self._counter("llm_tenant_requests", "Usage records.", "tenant")
        self._throttled = self._counter("llm_tenant_throttled", "Had to wait for their tenant's quota.", "tenant")
        self._attempts = self._counter("llm_attempts", "Begin records that landed.", "tier", "kind")
        self._dlq = self._counter("llm_dlq_records", "Written to the DLQ.", "reason")

    def _make_engine_metrics(self) -> None:
        self._steps = self._counter("llm_steps", "Steps that were applied.")
        step = self._histogram("llm_step_duration_seconds", "What a step's time goes to.", STEP_S, "part")
        self._parts = {part: step.labels(part) for part in _PARTS}
        self._step_failures = self._counter("llm_step_failures", "Executions that raised.")
        self._batch = self._histogram("llm_batch_sequences", "With a token in the step.", BATCH)
        batch_tokens = self._counter("llm_batch_tokens", "Computed.", "phase")
        self._prefill_tokens, self._decode_tokens = batch_tokens.labels("prefill"), batch_tokens.labels("decode")
        self._paused = self._counter("llm_paused_sequences", "Had a seat and no token in a step.")
        self._preemptions = self._counter("llm_preemptions", "Lost seats.", "tier", "cause", "mode")
        self._preempted_tokens = self._counter("llm_preempted_tokens", "Left the device pool with them.", "mode")
        self._swap_blocks = self._counter("llm_swap_blocks", "Copied to or from the host pool.", "direction")
        self._swap_bytes = self._counter("llm_swap_bytes", "Copied to or from the host pool.", "direction")
        self._swap_seconds = self._counter("llm_swap_seconds", "Time of those copies.", "direction", "kind")
        self._recompute_seconds = self._counter("llm_recompute_seconds", "Bringing sequences back.", "kind")
        self._block_size = Gauge("llm_kv_block_bytes", "One block.", registry=self.registry)

    def _make_kafka_metrics(self) -> None:
        self._consumed = self._counter("messaging_client_consumed_messages", "Requests taken in.", *_DESTINATION)
        self._sent = self._counter("messaging_client_sent_messages", "Records acknowledged.", *_DESTINATION)
        self._operation = self._histogram(
            "messaging_client_operation_duration_seconds",
            "A send, up to its acknowledgement.",
            MESSAGING_S,
            "messaging_operation_name",
            *_DESTINATION,
            "error_type",
        )
        self._process = self._histogram(
            "messaging_process_duration_seconds", "From taking in to done.", PROCESS_S, *_DESTINATION, "error_type"
        )
        self._rebalances = self._counter("llm_kafka_rebalances", "Assignments.", "tier")
        self._replaced = self._counter("llm_lanes_replaced", "Consumers that had died.", "tier")
        self._lag = self._histogram("llm_loop_lag_seconds", "How late the event loop was.", LAG_S)
        self._restarts = self._counter("llm_worker_restarts", "By the supervisor.")
        self._info = Info("llm_worker", "This worker.", registry=self.registry)
        self._info.info({"worker": self._worker, "model": ""})

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(name, text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: Sequence[float], *labels: str) -> Histogram:
        return Histogram(name, text, labels, registry=self.registry, buckets=buckets)

    def _begin_at_zero(self) -> None:
        """A series that shows up with its first event has no rate for it."""
        for tier in self._tiers:
            self._goodput.labels(tier)
            self._rebalances.labels(tier)
            self._replaced.labels(tier)
            self._queue_wait.labels(tier)
            for kind in ("input", "output", "cached"):
                self._tokens.labels(tier, kind)
            for kind in ("first", "resumed", "restarted"):
                self._attempts.labels(tier, kind)
            for code in ErrorCode:
                self._refused.labels(tier, code)
            for cause in ("seat", "block"):
                for mode in ("swap", "recompute"):
                    self._preemptions.labels(tier, cause, mode)
            for met in ("true", "false"):
                for slo in ("ttft", "tpot", "all"):
                    if slo == "all" or getattr(self._tiers[tier], f"{slo}_ms") is not None:
                        self._slo.labels(tier, slo, met)
        for reason in DeadLetterReason:
            self._dlq.labels(reason)
        for tenant in self._tenants.known:
            self._throttled.labels(tenant)
            self._tenant_requests.labels(tenant)
            for kind in ("input", "output", "cached"):
                self._tenant_tokens.labels(tenant, kind)
        for mode in ("swap", "recompute"):
            self._preempted_tokens.labels(mode)
        for kind in ("predicted", "actual"):
            self._recompute_seconds.labels(kind)
            for direction in ("out", "in"):
                self._swap_seconds.labels(direction, kind)
        for direction in ("out", "in"):
            self._swap_blocks.labels(direction)
            self._swap_bytes.labels(direction)

    def model_loaded(
        self,
        model: str,
        block_bytes: int = 0,
        copy_seconds: Callable[[], tuple[float, float]] = lambda: (0.0, 0.0),
        prefill_seconds: Callable[[int], float] = lambda num_tokens: 0.0,
    ) -> None:
        """What was not known before. copy_seconds: per block, out and in, as the choice of a preemption counts them;
        prefill_seconds: of so many tokens, likewise."""
        self._model, self._block_bytes = model, block_bytes
        self._copy_seconds, self._prefill_seconds = copy_seconds, prefill_seconds
        self._block_size.set(block_bytes)
        self._info.info({"worker": self._worker, "model": model})

    # Steps (a StepObserver)

    def step(self, record: StepRecord, times: StepTimes, events: Sequence[EngineEvent]) -> None:
        self._steps.inc()
        parts = self._parts
        parts["schedule"].observe(times.schedule)
        parts["execute"].observe(times.execute)
        parts["apply"].observe(times.apply)
        parts["publish"].observe(times.publish)
        if times.copies is not None:
            parts["copy"].observe(sum(times.copies))
        self._batch.observe(times.num_sequences)
        self._prefill_tokens.inc(record.num_prefill_tokens)
        self._decode_tokens.inc(record.num_decode_tokens)
        if record.paused:
            self._paused.inc(len(record.paused))
        if record.num_swap_out_blocks or record.num_swap_in_blocks:
            self._note_swaps(record, times)
        if record.preempted or self._recomputing:
            self._note_preemptions(record, times, events)

    def step_failed(self) -> None:
        self._step_failures.inc()

    def _note_swaps(self, record: StepRecord, times: StepTimes) -> None:
        actual = (times.copies.swap_out, times.copies.swap_in) if times.copies is not None else (0.0, 0.0)
        counts = (record.num_swap_out_blocks, record.num_swap_in_blocks)
        for direction, count, predicted, took in zip(("out", "in"), counts, self._copy_seconds(), actual, strict=True):
            self._swap_blocks.labels(direction).inc(count)
            self._swap_bytes.labels(direction).inc(count * self._block_bytes)
            if count:
                self._swap_seconds.labels(direction, "predicted").inc(count * predicted)
                self._swap_seconds.labels(direction, "actual").inc(took)

    def _note_preemptions(self, record: StepRecord, times: StepTimes, events: Sequence[EngineEvent]) -> None:
        for preemption in record.preempted:
            self._preemptions.labels(preemption.lane, preemption.cause, preemption.mode).inc()
            self._preempted_tokens.labels(preemption.mode).inc(preemption.num_tokens)
            if preemption.mode == "recompute":
                self._recomputing[preemption.request_id, preemption.choice] = None
                self._recompute_seconds.labels("predicted").inc(self._prefill_seconds(preemption.num_tokens))
        recomputing = self._recomputing
        while len(recomputing) > MAX_RECOMPUTING:  # those that were cancelled while they waited
            del recomputing[next(iter(recomputing))]
        for seat in record.seated:
            if seat in recomputing:
                recomputing[seat] = record.at
        for event in events:
            seated_at = recomputing.pop((event.request_id, event.choice), None) if recomputing else None
            if seated_at is not None and isinstance(event, TokenEvent):
                self._recompute_seconds.labels("actual").inc(times.ended - seated_at)

    # Requests

    def consumed(self, topic: str) -> None:
        """A request record was taken in."""
        self._consumed.labels("kafka", topic).inc()

    def throttled(self, tenant: str) -> None:
        """One of its requests has to wait for the tenant's quota."""
        self._throttled.labels(self._tenants.label(tenant)).inc()

    def begun(self, tier: str, kind: str) -> None:
        """A `begin` landed: `first`, `resumed` or `restarted`."""
        self._attempts.labels(tier, kind).inc()

    def buried(self, reason: str) -> None:
        """A dead letter was acknowledged."""
        self._dlq.labels(reason).inc()

    def billed(self, tier: str, tenant: str, end: End) -> None:
        """The usage record of a request was acknowledged."""
        label, usage = self._tenants.label(tenant), end.usage
        self._tenant_requests.labels(label).inc()
        if usage is None:
            return
        counts = (
            ("input", usage.prompt_tokens), ("output", usage.completion_tokens), ("cached", usage.cached_tokens)
        )  # fmt: skip
        for kind, count in counts:
            self._tokens.labels(tier, kind).inc(count)
            self._tenant_tokens.labels(label, kind).inc(count)

    def served(self, served: "Served") -> None:
        """The service of a record is over."""
        end, tier = served.end, served.tier
        error = _error_type(end)
        self._process.labels("kafka", served.topic, error or served.fault).observe(served.process_seconds)
        self._requests.labels(tier, served.outcome, _first_reason(end)).inc()
        if end is None or served.outcome != "answered":
            return
        if end.error is not None:
            self._refused.labels(tier, end.error.code).inc()
        if served.operation:
            self._observe_times(served, error)
        self._judge(served)

    def _observe_times(self, served: "Served", error: str) -> None:
        assert served.end is not None
        timing = served.end.timing
        labels = (served.tier, served.operation, "carousel", self._model)
        exemplar = {"trace_id": served.trace_id} if served.trace_id else None
        if timing is None:
            return
        self._duration.labels(*labels, error).observe(timing.total_ms / 1000, exemplar)
        if served.seated:
            self._queue_wait.labels(served.tier).observe(timing.queued_ms / 1000)
        if timing.ttft_ms is not None and not served.resumed:
            self._ttft.labels(*labels).observe(timing.ttft_ms / 1000, exemplar)
        if served.tpot is not None:
            self._tpot.labels(*labels).observe(served.tpot, exemplar)

    def _judge(self, served: "Served") -> None:
        """Whether a request got what its tier promises."""
        end, tier = served.end, self._tiers[served.tier]
        assert end is not None
        reason = _first_reason(end)
        if reason == FinishReason.CANCELLED or (end.error is not None and end.error.code not in _OURS):
            return
        met_all = end.error is None and reason != FinishReason.DEADLINE
        ttft = None if end.timing is None or served.resumed else end.timing.ttft_ms
        tpot = None if served.tpot is None else served.tpot * 1000
        for slo, actual, target in (("ttft", ttft, tier.ttft_ms), ("tpot", tpot, tier.tpot_ms)):
            if target is not None and actual is not None:
                self._slo.labels(served.tier, slo, "true" if actual <= target else "false").inc()
                met_all &= actual <= target
        self._slo.labels(served.tier, "all", "true" if met_all else "false").inc()
        if met_all and end.usage is not None:
            self._goodput.labels(served.tier).inc(end.usage.completion_tokens)

    # Kafka and the process

    def sent(self, topic: str, is_reply: bool, seconds: float, error_type: str) -> None:
        """A record is acknowledged after so many seconds, or is not: `error_type` says why, "" for acknowledged."""
        name = self._reply_template if is_reply else topic
        self._operation.labels("send", "kafka", name, error_type).observe(seconds)
        if not error_type:
            self._sent.labels("kafka", name).inc()

    def rebalanced(self, tier: str) -> None:
        self._rebalances.labels(tier).inc()

    def lane_replaced(self, tier: str) -> None:
        self._replaced.labels(tier).inc()

    def loop_late(self, seconds: float) -> None:
        self._lag.observe(seconds)

    def restarted(self, times: int) -> None:
        """So often has the supervisor started this worker again, before this process."""
        self._restarts.inc(times)


@dataclass(frozen=True, slots=True)
class Served:
    """What became of one record."""

    tier: str
    topic: str
    outcome: str
    end: End | None
    process_seconds: float
    operation: str = ""  # gen_ai.operation.name; "" for a request that could not be decoded
    seated: bool = False  # it had a seat here
    resumed: bool = False  # it went on after the tokens of another attempt
    tpot: float | None = None  # seconds per output token after the first
    trace_id: str = ""  # "" where it is not recorded
    fault: str = ""  # error type of an outcome without an `end`


def _first_reason(end: End | None) -> str:
    if end is None:
        return ""
    return end.finish_reason[0] if isinstance(end.finish_reason, tuple) else end.finish_reason


def _error_type(end: End | None) -> str:
    if end is not None and end.error is not None:
        return end.error.code
    reason = _first_reason(end)
    return reason if reason in (FinishReason.DEADLINE, FinishReason.CANCELLED) else ""
