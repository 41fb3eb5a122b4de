"""The spans of a request, as docs/metrics.md lists them: names, kinds, parents, links, attributes and order."""

import json
from collections.abc import Sequence

import pytest
import structlog
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import SpanKind, StatusCode, format_span_id, format_trace_id

from schemas.headers import read_traceparent
from tests import documented
from tests.worker.test_recovery import running_until
from tests.worker.world import LANE, World, turns, until
from worker import loop, side_topics
from worker.tracing import format_traceparent

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
PRODUCER = ("traceparent", f"00-{TRACE_ID}-b7ad6b7169203331-01".encode())
REPLY = "send replies.{correlation_id}"
ENGINE = "text_completion fake"
# Span -> the row of docs/metrics.md that has its attributes.
ROWS = {f"process {LANE}": "process", ENGINE: "engine", "chat fake": "engine", "send prompts.dlq": "send {DLQ topic}"}


def named(world: World, name: str) -> list[ReadableSpan]:
    """The finished spans of that name, in the order of their start."""
    return sorted((s for s in world.spans.get_finished_spans() if s.name == name), key=lambda s: s.start_time)


def only(world: World, name: str) -> ReadableSpan:
    (span,) = named(world, name)
    return span


def is_child(span: ReadableSpan, parent: ReadableSpan) -> bool:
    return span.parent is not None and span.parent.span_id == parent.context.span_id


def phases(world: World) -> list[str]:
    """Names of the engine span's children, in their order."""
    engine = named(world, ENGINE)[-1]
    children = [s for s in world.spans.get_finished_spans() if is_child(s, engine)]
    return [s.name for s in sorted(children, key=lambda s: (s.start_time, s.end_time))]


def of_request(world: World) -> list[ReadableSpan]:
    return [span for span in world.spans.get_finished_spans() if span.name != "llm.step"]


def assert_documented(spans: Sequence[ReadableSpan]) -> None:
    """No span and no attribute that docs/metrics.md does not name; every attribute of a span without alternatives."""
    rows = documented.span_attributes()
    for span in spans:
        assert set(span.attributes) <= rows[ROWS.get(span.name, span.name)], span.name


async def test_one_request():
    """process under the caller's span and linked to it; queue, engine and two sends under it; prefill, decode below."""
    world = World(traced=True)
    world.publish("a", headers=[PRODUCER])
    async with world.worker() as server:
        await world.serve(server)
    process, queue, engine = only(world, f"process {LANE}"), only(world, "llm.queue"), only(world, ENGINE)
    begin, end = named(world, REPLY)
    assert {format_trace_id(span.context.trace_id) for span in of_request(world)} == {TRACE_ID}
    assert format_span_id(process.parent.span_id) == "b7ad6b7169203331"
    assert [format_span_id(link.context.span_id) for link in process.links] == ["b7ad6b7169203331"]
    assert all(is_child(span, process) for span in (queue, engine, begin, end))
    assert phases(world) == ["llm.prefill", "llm.decode"]
    prefill, decode = only(world, "llm.prefill"), only(world, "llm.decode")
    assert process.kind is SpanKind.CONSUMER
    assert begin.kind is end.kind is SpanKind.PRODUCER
    assert queue.kind is engine.kind is prefill.kind is decode.kind is SpanKind.INTERNAL
    assert process.start_time <= queue.start_time <= queue.end_time == prefill.start_time
    assert prefill.end_time == decode.start_time < decode.end_time <= engine.end_time <= process.end_time
    assert [event.name for event in engine.events] == ["first_token"]
    assert engine.events[0].timestamp == prefill.end_time
    assert_documented(world.spans.get_finished_spans())
    assert len(of_request(world)) == 7


async def test_what_its_spans_say():
    """Every value of a plain request's attributes."""
    world = World(traced=True)
    world.publish("a", headers=[PRODUCER, ("tenant", b"acme"), ("priority", b"5")], seed=2**64 - 1, top_p=0.5)
    async with world.worker() as server:
        await world.serve(server)
    source = {"messaging.system": "kafka", "messaging.message.conversation_id": "a"}
    process = dict(only(world, f"process {LANE}").attributes)
    assert process.pop("messaging.message.body.size") == len(world.broker.topics[LANE][0][0].value)
    assert process == source | {
        "messaging.operation.name": "process",
        "messaging.operation.type": "process",
        "messaging.destination.name": LANE,
        "messaging.destination.partition.id": "0",
        "messaging.kafka.offset": 0,
        "messaging.consumer.group.name": LANE,
        "llm.tier": "standard",
        "llm.tenant": "acme",
        "llm.priority": 5,
        "llm.attempts": 1,
        "llm.outcome": "answered",
    }
    assert dict(only(world, "llm.queue").attributes) == {
        "llm.tier": "standard",
        "llm.priority": 5,
        "llm.queue.delayed": False,
    }
    engine = dict(only(world, ENGINE).attributes)
    waited, first, whole = (
        engine.pop(f"gen_ai.latency.{name}") for name in ("time_in_queue", "time_to_first_token", "e2e")
    )
    assert 0 <= waited < first < whole < 1
    assert engine == {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "carousel",
        "gen_ai.request.model": "fake",
        "gen_ai.request.max_tokens": 12,
        "gen_ai.request.temperature": 0.0,
        "gen_ai.request.top_p": 0.5,
        "gen_ai.request.top_k": -1,
        "gen_ai.request.seed": str(2**64 - 1),
        "gen_ai.request.choice.count": 1,
        "gen_ai.response.id": "a",
        "gen_ai.response.model": "fake",
        "gen_ai.response.finish_reasons": ("length",),
        "gen_ai.usage.input_tokens": 5,
        "gen_ai.usage.output_tokens": 12,
        "gen_ai.usage.cache_read.input_tokens": 0,
        "llm.preemptions": 0,
    }
    begin, end = (dict(span.attributes) for span in named(world, REPLY))
    reply = source | {
        "messaging.operation.name": "send",
        "messaging.operation.type": "send",
        "messaging.destination.template": "replies.{correlation_id}",
        "messaging.destination.temporary": True,
    }
    num_records = len(world.broker.topics["replies.a"][0])
    assert begin == reply | {"llm.event": "begin", "messaging.kafka.offset": 0, "llm.reply.records": 1}
    assert end == reply | {
        "llm.event": "end",
        "messaging.kafka.offset": num_records - 1,
        "llm.reply.records": num_records,
    }


async def test_traceparent_is_on_begin_and_end_and_names_their_spans():
    """Exactly one each, and none on tokens; it is the context of the span that wrote the record."""
    world = World(traced=True)
    world.publish("a", headers=[PRODUCER])
    async with world.worker() as server:
        await world.serve(server)
    written = []
    for record in world.broker.topics["replies.a"][0]:
        values = [value for name, value in record.headers if name == "traceparent"]
        assert len(values) == (dict(record.headers)["event"] != b"tokens")
        written += [read_traceparent(record.headers)] if values else []
    assert written == [f"00-{TRACE_ID}-{format_span_id(span.context.span_id)}-01" for span in named(world, REPLY)]


@pytest.mark.parametrize("mode", ["swap", "recompute"])
async def test_a_preempted_request(mode: str):
    """Its decode ends where it loses its seat; preempted lasts until it has one again; swapped is a part of that."""
    world = World(traced=True, max_num_seqs=1, num_host_blocks=64, preemption=mode)
    world.publish("low", headers=[PRODUCER, ("priority", b"1")], max_tokens=40)
    async with world.worker() as server:
        await running_until(world, server, "low", 6)
        world.publish("high", headers=[("priority", b"6")], max_tokens=4)
        await world.serve(server)
        page = server.metrics
    low = next(s for s in named(world, ENGINE) if s.attributes["gen_ai.response.id"] == "low")
    children = sorted((s for s in of_request(world) if is_child(s, low)), key=lambda s: (s.start_time, s.end_time))
    preempted = only(world, "llm.preempted")
    again = ["llm.decode"] if mode == "swap" else ["llm.prefill", "llm.decode"]
    assert [s.name for s in children] == ["llm.prefill", "llm.decode", "llm.preempted", *again]
    assert children[1].end_time == preempted.start_time < preempted.end_time == children[3].start_time
    attributes = dict(preempted.attributes)
    blocks, tokens = attributes.pop("llm.preemption.blocks"), attributes.pop("llm.preemption.tokens")
    assert attributes == {
        "llm.choice": 0,
        "llm.preemption.mode": mode,
        "llm.preemption.reason": "seat",
        "llm.preemption.beneficiary": "high",
    }
    assert (blocks, tokens) == (record_of(world).num_blocks, record_of(world).num_tokens)
    assert 0 < tokens <= blocks * 4
    assert low.attributes["llm.preemptions"] == 1
    if mode == "swap":
        swapped = only(world, "llm.swapped")
        assert is_child(swapped, preempted)
        assert preempted.start_time < swapped.start_time <= swapped.end_time == preempted.end_time
        assert dict(swapped.attributes) == {"llm.choice": 0, "llm.preemption.blocks": blocks}
    else:
        assert named(world, "llm.swapped") == []
        assert children[3].attributes["llm.recompute"] is True
    assert "llm.recompute" not in children[0].attributes
    assert_documented(world.spans.get_finished_spans())
    labels = {"tier": "standard", "cause": "seat", "mode": mode}
    assert page.registry.get_sample_value("llm_preemptions_total", labels) == 1


async def test_a_prefill_that_is_swapped_out_goes_on_as_a_prefill():
    """No token yet: what follows the swap is the rest of the prefill, and nothing of it is computed again."""
    world = World(traced=True, max_num_seqs=1, num_host_blocks=64, preemption="swap")
    world.publish("low", prompt="x" * 240, headers=[("priority", b"1")], max_tokens=4)
    async with world.worker() as server:
        world.deliver(server)
        await until(lambda: len(world.steps) == 1)  # of four
        world.publish("high", headers=[("priority", b"6")], max_tokens=4)
        await world.serve(server)
    low = next(s for s in named(world, ENGINE) if s.attributes["gen_ai.response.id"] == "low")
    children = sorted((s for s in of_request(world) if is_child(s, low)), key=lambda s: (s.start_time, s.end_time))
    assert [s.name for s in children] == ["llm.prefill", "llm.preempted", "llm.prefill", "llm.decode"]
    assert children[1].attributes["llm.preemption.mode"] == "swap"
    assert dict(children[2].attributes) == {"llm.choice": 0}


def record_of(world: World):
    (preemption,) = (p for record in world.steps for p in record.preempted)
    return preemption


async def test_a_resumed_request_joins_the_trace():
    """Another worker goes on after a crash: the same trace, linked to the send of the first attempt's `begin`."""
    world = World(traced=True)
    world.publish("a", headers=[PRODUCER], max_tokens=40)
    async with world.worker("w1") as server:
        await running_until(world, server, "a", 8)
    first = {span.context.span_id for span in world.spans.get_finished_spans()}
    num_seen = len(world.answer("a").token_ids[0])
    world.source.lose()
    async with world.worker("w2") as server:
        await world.serve(server)
        attempts = {"tier": "standard", "kind": "resumed"}
        assert server.metrics.registry.get_sample_value("llm_attempts_total", attempts) == 1
    lost, process = named(world, f"process {LANE}")
    assert lost.attributes["llm.outcome"] == "lost"
    assert lost.attributes["error.type"] == "lost"
    assert {format_trace_id(span.context.trace_id) for span in of_request(world)} == {TRACE_ID}
    begun = named(world, REPLY)[0]
    assert begun.context.span_id in first
    assert [link.context.span_id for link in process.links] == [0xB7AD6B7169203331, begun.context.span_id]
    engine = named(world, ENGINE)[-1]
    assert is_child(engine, process)
    assert engine.attributes["llm.resumed_tokens"] == num_seen
    assert engine.attributes["gen_ai.usage.output_tokens"] == 40
    assert_documented(world.spans.get_finished_spans())


@pytest.mark.parametrize("traced", [True, False])
async def test_a_request_without_a_traceparent_is_one_trace_across_a_crash(traced: bool):
    """kcat and others send none; its trace id is that of where its record lies, and of no other record."""
    world = World(traced=traced)
    for request in ("a", "b"):
        world.publish(request, max_tokens=40)
    async with world.worker("w1") as server:
        await running_until(world, server, "a", 8)
    world.source.lose()
    async with world.worker("w2") as server:
        await world.serve(server)

    def trace_ids(request: str) -> set[str]:
        contexts = [
            read_traceparent(headers) for headers in (r.headers for r in world.broker.topics[f"replies.{request}"][0])
        ]
        return {context.split("-")[1] for context in contexts if context is not None}

    (of_a,), (of_b,) = trace_ids("a"), trace_ids("b")
    assert of_a != of_b
    assert len(world.answer("a").token_ids[0]) == 40
    assert {format_trace_id(span.context.trace_id) for span in of_request(world)} == ({of_a, of_b} if traced else set())


async def test_two_choices_have_phases_of_their_own():
    """n = 2: a prefill and a decode for each choice, told apart by `llm.choice`; the engine span ends with the last."""
    world = World(traced=True)
    world.publish("a", n=2, temperature=1.0)
    async with world.worker() as server:
        await world.serve(server)
    assert sorted(span.attributes["llm.choice"] for span in named(world, "llm.decode")) == [0, 1]
    engine = only(world, ENGINE)
    assert engine.attributes["gen_ai.response.finish_reasons"] == ("length", "length")
    assert engine.end_time == max(span.end_time for span in named(world, "llm.decode"))
    assert len(named(world, "llm.queue")) == 1


async def test_a_step_has_a_trace_of_its_own_and_links_to_its_requests():
    """One for each step here; by default one in a hundred."""
    world = World(traced=True)
    world.publish("a", headers=[PRODUCER])
    world.publish("b")
    async with world.worker() as server:
        await world.serve(server)
    steps = named(world, "llm.step")
    assert [step.attributes["llm.step"] for step in steps] == [record.step for record in world.steps]
    assert len({step.context.trace_id for step in steps}) == len(steps)
    assert all(step.parent is None for step in steps)
    requests = {span.context.span_id for span in named(world, f"process {LANE}")}
    assert {link.context.span_id for link in steps[1].links} == requests
    step, record = steps[1].attributes, world.steps[1]
    assert step["llm.step.decode_tokens"] == record.num_decode_tokens
    assert step["llm.step.sequences"] == record.num_running


async def test_what_the_caller_did_not_sample_is_not_recorded():
    """Flag 00: no span, and the trace goes on on the reply records all the same."""
    world = World(traced=True)
    world.publish("a", headers=[("traceparent", PRODUCER[1][:-1] + b"0")])
    async with world.worker() as server:
        await world.serve(server)
    assert of_request(world) == []
    begin = world.broker.topics["replies.a"][0][0]
    assert read_traceparent(begin.headers).startswith(f"00-{TRACE_ID}-")
    assert read_traceparent(begin.headers).endswith("-00")


async def test_without_tracing_no_observer_and_the_callers_context_passes_through():
    """No endpoint: the engine calls nobody for a request, and `begin` and `end` carry one context still."""
    world = World()
    world.publish("a", headers=[PRODUCER])
    world.publish("b")
    async with world.worker() as server:
        world.deliver(server)
        await until(lambda: len(server.engine._streams) == 2)
        assert all(stream.observer is None for stream in server.engine._streams.values())
        await world.serve(server)
    assert world.spans.get_finished_spans() == ()
    assert read_traceparent(world.broker.topics["replies.a"][0][0].headers) == PRODUCER[1].decode()
    begin, end = (world.broker.topics["replies.b"][0][i].headers for i in (0, -1))
    assert read_traceparent(begin) is not None
    assert read_traceparent(begin) == read_traceparent(end)


@pytest.mark.parametrize("traces", [0, 1, 2])
@pytest.mark.parametrize("answerable", [True, False])
async def test_t36_a_dead_letter_has_one_traceparent(traces: int, answerable: bool):
    """`send prompts.dlq` under process; the record has exactly one traceparent: its own last one, else that span's."""
    world = World(traced=True)
    stale = ("traceparent", f"00-{'1' * 32}-{'2' * 16}-01".encode())
    where = () if answerable else (("reply_to", b"__secret"),)
    world.publish("a", raw=b"\xc1", headers=[*[stale, PRODUCER][2 - traces :], *where])
    async with world.worker() as server:
        await world.serve(server)
        await until(lambda: not server._burials)
        reason = "invalid_request" if answerable else "reply_to_forbidden"
        assert server.metrics.registry.get_sample_value("llm_dlq_records_total", {"reason": reason}) == 1
    process, sent = only(world, f"process {LANE}"), only(world, "send prompts.dlq")
    assert is_child(sent, process)
    assert sent.kind is SpanKind.PRODUCER
    assert process.status.status_code is StatusCode.ERROR
    assert process.attributes["error.type"] == reason == sent.attributes["llm.dlq.reason"]
    (letter,) = world.broker.topics["prompts.dlq"][0]
    values = [value for name, value in letter.headers if name == "traceparent"]
    assert values == [PRODUCER[1] if traces else format_traceparent(sent.context).encode()]
    assert_documented(world.spans.get_finished_spans())


async def test_every_documented_attribute_is_there(monkeypatch: pytest.MonkeyPatch):
    """Over a served, a preempted, a resumed, a delayed and a failed request: all that docs/metrics.md promises."""
    monkeypatch.setattr(loop, "RETRY_PAUSES_S", (0.0,))
    monkeypatch.setattr(side_topics, "PUBLISH_RETRY_S", 0.01)
    seen: dict[str, set[str]] = {}
    for mode in ("swap", "recompute"):
        world = World(traced=True, max_num_seqs=1, num_host_blocks=64, preemption=mode)
        world.publish("low", headers=[("priority", b"1")], max_tokens=40, seed=7)
        async with world.worker() as server:
            await running_until(world, server, "low", 6)
            world.publish("high", headers=[("priority", b"6")], max_tokens=4)
            await running_until(world, server, "low", 20)
        world.source.lose()
        world.publish("broken", headers=[("priority", b"0")], max_tokens=200)
        async with world.worker() as server:
            server.runner.failing = range(150, 10**6)
            world.sink.send = failing_once(world.sink.send)
            await world.serve(server)
        world.publish("bad", raw=b"\xc1")
        async with world.worker() as server:
            world.sink.publish = never
            world.deliver(server)
            await turns(20)
            world.source.lose()
            await until(lambda: not server.num_calls)
        for span in world.spans.get_finished_spans():
            seen.setdefault(ROWS.get(span.name, span.name), set()).update(span.attributes)
    rows = {row: names for row, names in documented.span_attributes().items() if not row.startswith("client")}
    assert seen == rows


async def never(*arguments):
    """A publication that does not land."""
    return False


def failing_once(send):
    """The first call does not land."""
    failed = []

    async def call(*arguments):
        if not failed:
            failed.append(True)
            return None
        return await send(*arguments)

    return call


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": "S3cret"},
        {"messages": [{"role": "user", "content": "S3cret"}]},
        {"prompt": "x", "stop": ["S3cret"], "user": "x"},
        {"prompt": ["S3cret"]},
        {"prompt": "x", "temperature": "S3cret"},
        {"prompt": "x", "model": "other"},
    ],
    ids=["prompt", "messages", "stop", "type", "value", "model"],
)
async def test_no_prompt_and_no_answer_in_traces_logs_or_dead_letters(body: dict[str, object]):
    """Served or refused: spans, log lines and what the DLQ says about a record hold nothing of its content."""
    world = World(traced=True)
    raw = json.dumps({"max_tokens": 12, "temperature": 0} | body).encode()
    world.publish("a", raw=raw, headers=[PRODUCER])
    world.publish("b", raw=raw[:-1], headers=[PRODUCER])  # cut off: no JSON any more
    with structlog.testing.capture_logs() as lines:
        async with world.worker() as server:
            await world.serve(server)
            await until(lambda: not server._burials)
    written = [span.to_json() for span in world.spans.get_finished_spans()] + [str(line) for line in lines]
    letters = [header for letter in world.broker.topics["prompts.dlq"][0] for header in letter.headers]
    assert len(letters) > 2
    assert written
    answer = world.answer("a")
    told = "".join(answer.text.values())
    for text in [*written, *map(str, letters)]:
        assert "S3cret" not in text
        assert not told or told not in text
