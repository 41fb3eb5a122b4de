"""What the worker counts, on an in-memory broker. That every documented name is there: e2e/test_telemetry.py."""

import threading
from types import SimpleNamespace

import pytest
from prometheus_client.openmetrics.exposition import generate_latest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from schemas.codec import ContentType, decode_map
from schemas.reasons import DeadLetterReason, ErrorCode, FinishReason
from schemas.records import End, ErrorInfo, Timing, Usage
from schemas.topics import DEFAULT_TIERS, Tier
from tests import documented
from tests.worker.test_recovery import running_until
from tests.worker.test_tracing import PRODUCER, TRACE_ID
from tests.worker.world import LANE, World, until
from worker.app import Serving
from worker.call import Outcome
from worker.config import Tenant
from worker.engine.outputs import StepOutcome, StepPlan
from worker.health import Health
from worker.live_metrics import LiveMetrics
from worker.metrics import OTHER, Metrics, Served, TenantLabels
from worker.server import MAX_AGE_S
from worker.transport.memory import MemoryRecord

TIER = {"tier": "standard"}
GEN_AI = TIER | {
    "gen_ai_operation_name": "text_completion",
    "gen_ai_provider_name": "carousel",
    "gen_ai_request_model": "fake",
}
PROMISING = {"standard": Tier("standard", default_priority=4, priority_cap=6, ttft_ms=100.0, tpot_ms=20.0)}


def value(metrics: Metrics, name: str, **labels: str) -> float:
    return metrics.registry.get_sample_value(name, labels) or 0.0


def test_tenants_are_bounded():
    """Those of the configuration first, then the first come; the rest together."""
    labels = TenantLabels(["acme", "umbrella"], 3)
    assert [labels.label(name) for name in ("x", "y", "acme", "x", "z", "umbrella")] == [
        "x", OTHER, "acme", "x", OTHER, "umbrella"
    ]  # fmt: skip


async def test_a_thousand_tenants_are_a_handful_of_series():
    """Whatever callers name, there is a bounded number of series, and no token is lost to it."""
    world = World(metrics_max_tenants=5, tenants={"acme": Tenant()})
    for i in range(40):
        world.publish(f"r{i}", headers=[("tenant", f"tenant-{i}".encode())], max_tokens=2)
    async with world.worker() as server:
        await world.serve(server)
        metrics = server.metrics
    (family,) = (f for f in metrics.registry.collect() if f.name == "llm_tenant_tokens")
    counts = {s.labels["tenant"]: s.value for s in family.samples if s.labels["type"] == "output"}
    assert counts == dict.fromkeys(("tenant-0", "tenant-1", "tenant-2", "tenant-3"), 2) | {OTHER: 72, "acme": 0}


async def test_counters_agree_with_the_usage_records_to_the_token():
    """Served, preempted, cached, refused, undecodable and duplicate requests: the sums are those of the topic."""
    world = World(max_num_seqs=2, num_host_blocks=32, num_blocks=70)
    prefix = "The same beginning for all of them. "
    for name in ("low1", "low2"):
        world.publish(name, headers=[("priority", b"0")], max_tokens=60)
    async with world.worker() as server:
        await running_until(world, server, "low2", 4)
        for i in range(12):
            headers = [("priority", str(i % 7).encode()), ("tenant", f"t{i % 3}".encode())]
            world.publish(f"r{i}", prompt=prefix + "x" * i, headers=headers, max_tokens=5 + 3 * i)
        world.publish("long", prompt="y" * 300)
        world.publish("bad", raw=b"\xc1")
        world.publish("r1", prompt="again")
        await world.serve(server)
        metrics = server.metrics
    records = [decode_map(record.value, ContentType.MSGPACK) for record in world.broker.topics["usage"][0]]
    assert len(records) == 16
    assert sum(record["cached_tokens"] for record in records) > 0
    assert any(record.preempted for record in world.steps)
    fields = {"input": "prompt_tokens", "output": "completion_tokens", "cached": "cached_tokens"}
    for kind, field in fields.items():
        assert value(metrics, "llm_tokens_total", **TIER, type=kind) == sum(r[field] for r in records)
        for tenant in ("t0", "t1", "t2", "default"):
            theirs = sum(r[field] for r in records if r["tenant"] == tenant)
            assert value(metrics, "llm_tenant_tokens_total", tenant=tenant, type=kind) == theirs
    assert value(metrics, "llm_tenant_requests_total", tenant="t1") == sum(r["tenant"] == "t1" for r in records)
    ended = {"tier": "standard", "outcome": "answered"}
    assert value(metrics, "llm_requests_total", **ended, finish_reason="length") == 14
    assert value(metrics, "llm_requests_total", **ended, finish_reason="error") == 2
    assert value(metrics, "llm_requests_total", tier="standard", outcome="duplicate", finish_reason="") == 1
    for code in ("prompt_too_long", "invalid_request"):
        assert value(metrics, "llm_requests_refused_total", **TIER, code=code) == 1
    assert value(metrics, "llm_dlq_records_total", reason="invalid_request") == 1


async def test_times_of_a_request_and_their_exemplar():
    """TTFT, TPOT and duration are what `end` says; the exemplar names the trace."""
    world = World(traced=True)
    world.publish("a", headers=[PRODUCER], max_tokens=12)
    async with world.worker() as server:
        await world.serve(server)
        metrics = server.metrics
    timing = world.answer("a").end.timing
    ttft = "gen_ai_server_time_to_first_token_seconds"
    assert value(metrics, f"{ttft}_sum", **GEN_AI) == timing.ttft_ms / 1000 > 0
    tpot = value(metrics, "gen_ai_server_time_per_output_token_seconds_sum", **GEN_AI)
    assert tpot == pytest.approx(0.001)  # a step takes a millisecond
    assert (
        value(metrics, "gen_ai_server_request_duration_seconds_sum", **GEN_AI, error_type="") == timing.total_ms / 1000
    )
    assert value(metrics, "llm_queue_wait_seconds_count", **TIER) == 1
    page = generate_latest(metrics.registry).decode()
    exemplars = {
        sample.exemplar.labels["trace_id"]
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if family.name == ttft and sample.exemplar
    }
    assert exemplars == {TRACE_ID}


async def test_a_resumed_request_has_no_time_to_first_token_here():
    """Its first token was another worker's; its other times count."""
    world = World()
    world.publish("a", max_tokens=40)
    async with world.worker("w1") as server:
        await running_until(world, server, "a", 8)
        lost = server.metrics
    world.source.lose()
    async with world.worker("w2") as server:
        await world.serve(server)
        metrics = server.metrics
    assert value(metrics, "gen_ai_server_time_to_first_token_seconds_count", **GEN_AI) == 0
    assert value(metrics, "gen_ai_server_request_duration_seconds_count", **GEN_AI, error_type="") == 1
    assert value(lost, "llm_requests_total", **TIER, outcome="lost", finish_reason="") == 1
    assert value(lost, "llm_tokens_total", **TIER, type="output") == 0


@pytest.mark.parametrize("mode", ["swap", "recompute"])
async def test_a_preemption_and_what_it_costs(mode: str):
    """Blocks, bytes, tokens, and predicted beside actual seconds."""
    world = World(traced=True, max_num_seqs=1, num_host_blocks=64, preemption=mode)
    world.publish("low", headers=[("priority", b"1")], max_tokens=40)
    async with world.worker() as server:
        await running_until(world, server, "low", 6)
        world.publish("high", headers=[("priority", b"6")], max_tokens=4)
        await world.serve(server)
        metrics = server.metrics
        stats = server.engine.scheduler.stats()
    (preemption,) = (p for record in world.steps for p in record.preempted)
    swapped = sum(record.num_swap_out_blocks for record in world.steps)
    assert value(metrics, "llm_preemptions_total", **TIER, cause="seat", mode=mode) == 1
    assert value(metrics, "llm_preempted_tokens_total", mode=mode) == preemption.num_tokens
    assert value(metrics, "llm_swap_blocks_total", direction="out") == swapped
    assert value(metrics, "llm_swap_bytes_total", direction="out") == 64 * swapped
    out = value(metrics, "llm_swap_seconds_total", direction="out", kind="predicted")
    predicted = value(metrics, "llm_recompute_seconds_total", kind="predicted")
    actual = value(metrics, "llm_recompute_seconds_total", kind="actual")
    if mode == "swap":
        assert swapped == preemption.num_blocks > 0
        assert (out, predicted, actual) == (pytest.approx(0.001 * swapped), 0, 0)
        assert value(metrics, "llm_swap_blocks_total", direction="in") == swapped
        return
    assert swapped == out == 0
    assert predicted == pytest.approx(preemption.num_tokens / 1000)
    assert actual == pytest.approx(0.001)  # one step, a millisecond
    assert stats.total_recomputed_tokens == sum(record.num_recomputed_tokens for record in world.steps)


async def test_steps_are_counted_and_timed():
    """One observation of each part for each step, and the tokens that were computed."""
    world = World()
    world.publish("a", prompt="x" * 100, max_tokens=10)
    async with world.worker() as server:
        await world.serve(server)
        metrics = server.metrics
    assert value(metrics, "llm_steps_total") == len(world.steps)
    for part in ("schedule", "execute", "apply", "publish"):
        assert value(metrics, "llm_step_duration_seconds_count", part=part) == len(world.steps)
        assert value(metrics, "llm_step_duration_seconds_sum", part=part) > 0
    assert value(metrics, "llm_batch_tokens_total", phase="prefill") == 100
    assert value(metrics, "llm_batch_tokens_total", phase="decode") == 9
    assert value(metrics, "llm_batch_sequences_sum") == len(world.steps)


async def test_sends_are_counted_by_template():
    """begin, tokens and end under the template, usage under its topic; what fails is no message."""
    world = World()
    world.publish("a", max_tokens=3)
    send, fails = world.sink.send, [True]

    async def failing(*arguments):
        return None if fails and fails.pop() else await send(*arguments)

    world.sink.send = failing
    async with world.worker() as server:
        await world.serve(server)
        metrics = server.metrics
    kafka = {"messaging_system": "kafka"}
    replies = kafka | {"messaging_destination_name": "replies.{correlation_id}"}
    num_records = len(world.broker.topics["replies.a"][0])
    timed = "messaging_client_operation_duration_seconds_count"
    send_of = replies | {"messaging_operation_name": "send"}
    assert value(metrics, "messaging_client_sent_messages_total", **replies) == num_records
    assert value(metrics, timed, **send_of, error_type="") == num_records
    assert value(metrics, timed, **send_of, error_type="unacknowledged") == 1
    usage = kafka | {"messaging_destination_name": "usage"}
    assert value(metrics, "messaging_client_sent_messages_total", **usage) == 1
    lane = kafka | {"messaging_destination_name": "prompts.standard"}
    assert value(metrics, "messaging_client_consumed_messages_total", **lane) == 1
    assert value(metrics, "messaging_process_duration_seconds_count", **lane, error_type="") == 1
    assert value(metrics, "llm_attempts_total", **TIER, kind="first") == 0
    assert value(metrics, "llm_attempts_total", **TIER, kind="restarted") == 1


async def test_a_throttled_tenant():
    """Whoever has to wait for quota is counted, once."""
    world = World(tenants={"acme": Tenant(tokens_per_s=10.0)}, quota_burst_seconds=2.0)
    for name in ("a", "b"):
        world.publish(name, headers=[("tenant", b"acme")], max_tokens=15)
    async with world.worker() as server:
        world.deliver(server)
        await running_until(world, server, "a", 2)
        assert value(server.metrics, "llm_tenant_throttled_total", tenant="acme") == 1


def served(
    ttft_ms: float | None = 50.0,
    tpot: float | None = 0.01,
    reason: FinishReason = FinishReason.STOP,
    code: ErrorCode | None = None,
    resumed: bool = False,
) -> Served:
    error = None if code is None else ErrorInfo(code, "no")
    end = End(0, reason, error=error, usage=Usage(3, 7), timing=Timing(1.0, ttft_ms, 90.0))
    return Served("standard", "prompts.standard", "answered", end, 0.1, "chat", True, resumed, tpot)


ERROR, OVERLOADED, INVALID = FinishReason.ERROR, ErrorCode.OVERLOADED, ErrorCode.INVALID_REQUEST


@pytest.mark.parametrize(
    ("given", "ttft", "tpot", "met_all"),
    [
        (served(), True, True, True),
        (served(ttft_ms=101.0), False, True, False),
        (served(tpot=0.021), True, False, False),
        (served(tpot=None), True, None, True),
        (served(resumed=True, ttft_ms=999.0), None, True, True),
        (served(reason=FinishReason.DEADLINE), True, True, False),
        (served(None, None, ERROR, OVERLOADED), None, None, False),
        (served(None, None, ERROR, INVALID), None, None, None),
        (served(reason=FinishReason.CANCELLED), None, None, None),
    ],
    ids=["met", "late", "slow", "one token", "resumed", "deadline", "overloaded", "invalid", "cancelled"],
)
def test_promises(given: Served, ttft: bool | None, tpot: bool | None, met_all: bool | None):
    """Each target that applies, and all of them with the deadline; goodput is what met all."""
    metrics = Metrics("w", PROMISING)
    metrics.served(given)
    for slo, met in (("ttft", ttft), ("tpot", tpot), ("all", met_all)):
        counts = {m: value(metrics, "llm_slo_requests_total", **TIER, slo=slo, met=m) for m in ("true", "false")}
        assert counts == {"true": met is True, "false": met is False}, slo
    assert value(metrics, "llm_goodput_tokens_total", **TIER) == (7 if met_all else 0)
    assert value(metrics, "llm_slo_target_seconds", **TIER, slo="ttft") == 0.1


async def test_t35_depth_and_oldest_age_are_what_to_scale_on():
    """Not to be read off offsets: what has a seat counts no more, what waits in Kafka and here does, and the age is
    that of the oldest without a seat."""
    world = World(max_num_seqs=1)
    world.publish("runs")
    computing, go_on = threading.Event(), threading.Event()
    async with world.worker() as server:
        execute = server.runner.execute

        def slow(plan: StepPlan) -> StepOutcome:
            if plan.step > 3:  # by then the first has its seat
                computing.set()
                assert go_on.wait(20)
            return execute(plan)

        def figure(name: str) -> float:
            return value(server.metrics, name, **TIER)

        server.runner.execute = slow
        lane = SimpleNamespace(
            lags=lambda: {0: 2, 7: 1}, gaps=lambda: {0: 0, 7: 0}, partitions=[0, 7], unread_ages=dict
        )
        live = LiveMetrics(server.metrics.registry, Health(stuck_after=30.0))
        live.watch(Serving(server.engine, {"standard": lane}, server))
        world.deliver(server)
        await until(computing.is_set)
        world.publish("waits")  # a millisecond later, by its timestamp
        world.clock.seconds = 8.0
        world.deliver(server)
        try:
            assert figure("llm_requests_in_service") == 2
            assert figure("llm_queue_depth") == 1 + 3
            assert figure("llm_queue_oldest_age_seconds") == pytest.approx(7.999)
        finally:
            go_on.set()
        await world.serve(server)
        assert (figure("llm_queue_depth"), figure("llm_queue_oldest_age_seconds")) == (3, 0.0)


async def test_what_waits_in_kafka_ages_although_all_that_was_taken_in_has_a_seat():
    """max_outstanding is reached, so nothing here waits; behind it, eight do. They are not older than the last record
    that was taken in, published at 1 ms; and by what a producer's clock says, nothing is older than ten minutes."""
    world = World(max_outstanding=2)
    for i in range(10):
        world.publish(f"r{i}", max_tokens=200, ignore_eos=True)
    world.clock.seconds = 0.5
    async with world.worker() as server:
        live = LiveMetrics(server.metrics.registry, Health(stuck_after=30.0))
        live.watch(Serving(server.engine, {"standard": world.source}, server))
        world.deliver(server)
        await running_until(world, server, "r1", 4)
        ages = []
        for world.clock.seconds in (5.0, 700.0):
            ages.append(value(server.metrics, "llm_queue_oldest_age_seconds", **TIER))
        assert value(server.metrics, "llm_sequences_running", **TIER) == 2
        assert value(server.metrics, "llm_lane_lag", **TIER, partition="0") == 8
    assert ages == [pytest.approx(4.999), 600.0]


async def test_a_commit_is_held_up_from_when_its_record_was_taken_in():
    """Not for as long as the record waited in Kafka before: a lane with a backlog holds no commit up."""
    world = World()
    world.publish("backlog", max_tokens=200, ignore_eos=True)
    world.clock.seconds = 300.0
    async with world.worker() as server:
        live = LiveMetrics(server.metrics.registry, Health(stuck_after=30.0))
        live.watch(Serving(server.engine, {"standard": world.source}, server))
        world.deliver(server)
        await running_until(world, server, "backlog", 4)
        ages = []
        for world.clock.seconds in (300.0, 425.0):
            ages.append(value(server.metrics, "llm_offsets_head_age_seconds", **TIER, partition="0"))
    assert ages == [0.0, 125.0]


def documented_row(name: str) -> str:
    (row,) = (line for line in documented.PAGE.read_text().splitlines() if line.startswith(f"| `{name}` |"))
    return row


async def test_every_error_type_of_a_service_is_documented():
    """Also those of records that have no `end`: what became of them, or why nobody could be answered."""
    world = World()
    world.publish("refused", raw=b"\xc1")
    world.publish("nowhere", topic=False)
    for reply_to in (b"__no", b"usage"):
        world.broker.topics[LANE][0].append(MemoryRecord(b"key", b"{}", [("reply_to", reply_to)]))
    world.publish("lost", max_tokens=200)
    async with world.worker() as server:
        world.deliver(server)
        await until(lambda: not server._burials and server.num_calls == 1)
        await running_until(world, server, "lost", 4)
        metrics = server.metrics
    (family,) = (f for f in metrics.registry.collect() if f.name == "messaging_process_duration_seconds")
    seen = {sample.labels["error_type"] for sample in family.samples}
    assert {"invalid_request", "reply_undeliverable", "lost"} < seen
    of_the_dlq = seen & set(DeadLetterReason) - {"invalid_request"}
    assert of_the_dlq
    row = documented_row("messaging_process_duration_seconds")
    codes = {"", *ErrorCode, FinishReason.DEADLINE, FinishReason.CANCELLED}
    assert [kind for kind in seen - codes - of_the_dlq if f"`{kind}`" not in row] == []
    assert {f"`{outcome.value}`" in row for outcome in (Outcome.LOST, Outcome.UNDELIVERABLE, Outcome.DEAD_LETTER)} == {
        True
    }
    assert "`reason` of `llm_dlq_records_total`" in row


def test_how_old_a_record_can_be_is_documented():
    """A producer's clock may be wrong: what is counted from publishing is cut."""
    assert f"at most {MAX_AGE_S:.0f} s before it" in documented.PAGE.read_text()


def test_what_is_rare_begins_at_zero():
    """An alert at the first dead letter, and a rate of the first request that had to wait: both need a zero before."""
    metrics = Metrics("w1", DEFAULT_TIERS, tenants=("acme",))
    counted = {
        (sample.name, *sample.labels.values()): sample.value
        for family in metrics.registry.collect()
        for sample in family.samples
    }
    for reason in DeadLetterReason:
        assert counted["llm_dlq_records_total", reason] == 0
    for tenant in ("acme", OTHER):
        assert counted["llm_tenant_throttled_total", tenant] == 0
        assert counted["llm_tenant_tokens_total", tenant, "output"] == 0
