"""What a real worker tells: every documented metric, its spans through the real collector into Jaeger, and silence when
nobody listens."""

import asyncio
import contextlib
import json
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from prometheus_client.parser import text_string_to_metric_families as classic_families

from bench.beside import Missing, free_port, tool
from schemas.codec import ContentType, decode_map
from schemas.errors import DecodeError
from schemas.log_consumer import LogConsumer
from schemas.records import Begin, Tokens
from service import tracing
from service.broker import EmbeddedBroker
from service.client import Client
from tests import documented, others
from tests.e2e.workers import WorkerProcess, producing

ROOT = Path(__file__).resolve().parent.parent.parent
OPENMETRICS = "application/openmetrics-text; version=1.0.0"
SETTINGS = """
quota_burst_seconds = 2.0
[tiers.interactive]
name = "interactive"
default_priority = 7
priority_cap = 9
ttft_ms = 60000.0
tpot_ms = 5000.0

[tiers.batch]
name = "batch"
default_priority = 1
priority_cap = 3

[tenants.slow]
tokens_per_s = 200.0
"""


def port_of(worker: WorkerProcess) -> int:
    return int(worker.logged("health.serving")[-1]["port"])


async def page_of(port: int, accept: str = OPENMETRICS) -> str:
    def fetch() -> str:
        request = urllib.request.Request(f"http://127.0.0.1:{port}/metrics", headers={"accept": accept})
        with urllib.request.urlopen(request, timeout=30) as response:
            return response.read().decode()

    return await asyncio.to_thread(fetch)


def families(page: str) -> dict[str, tuple[str, set[str], dict[tuple[str, ...], float]]]:
    """Name as Prometheus shows it -> (type, labels, samples by sample name and label values)."""
    found = {}
    for family in text_string_to_metric_families(page):
        name = family.name + {"counter": "_total", "info": "_info"}.get(family.type, "")
        labels = {label for sample in family.samples for label in sample.labels} - {"le"}
        samples = {(s.name, *s.labels.values()): s.value for s in family.samples}
        found[name] = family.type, labels, samples
    return found


async def usage_records(bootstrap: str) -> list[dict[str, Any]]:
    consumer = LogConsumer("usage", bootstrap_servers=bootstrap, auto_offset_reset="earliest")
    await consumer.start()
    try:
        records: list[dict[str, Any]] = []
        ends = await consumer.end_offsets(consumer.assignment())
        while any([await consumer.position(p) < end for p, end in ends.items()]):
            for batch in (await consumer.getmany(timeout_ms=200)).values():
                for record in batch:
                    with contextlib.suppress(DecodeError):  # another test's garbage
                        records.append(decode_map(record.value, ContentType.MSGPACK))
        return records
    finally:
        await consumer.stop()


@pytest.mark.broker
async def test_every_documented_metric_is_there(broker: EmbeddedBroker, tmp_path: Path):
    """Names, types and labels of /metrics are those of docs/metrics.md, no more and no less; each has a sample. The
    counters of tokens are the sums of the usage topic."""
    settings = tmp_path / "worker.toml"
    settings.write_text(SETTINGS)
    arguments = ("--config", str(settings), "--lane-prefix", "metrics.", "--metrics-port", "0", "--preemption", "swap")
    async with producing(broker.bootstrap, "metrics.", partitions=1) as producer:
        with WorkerProcess(broker.bootstrap, tmp_path / "w.log", *arguments, "--max-num-seqs", "1") as worker:
            async with Client(broker.bootstrap, lane_prefix="metrics.") as client:
                low = asyncio.create_task(
                    client.complete(prompt="x" * 40, tier="batch", max_tokens=300, ignore_eos=True, temperature=0)
                )
                await wait_for(lambda: running(port_of(worker), "batch"))
                await client.complete(prompt="y", tier="interactive", max_tokens=20, ignore_eos=True)
                slow = [client.complete(prompt="z", tier="interactive", tenant="slow", max_tokens=350) for _ in "12"]
                await producer._producer.send_and_wait("metrics.batch", b"\xc1", headers=[("reply_to", b"__no")])
                answers = [await low, *await asyncio.gather(*slow)]
            await asyncio.sleep(0.5)
            text = await page_of(port_of(worker))
            found = families(text)
            plain = await page_of(port_of(worker), "text/plain")
            check_lines(worker)
            assert worker.stop() == 0
    records = [r for r in await usage_records(broker.bootstrap) if r["input"][0].startswith("metrics.")]
    assert answers[0].preemptions.swap >= 1
    ours = {name: family for name, family in found.items() if not name.startswith("process_")}
    assert {name: family[:2] for name, family in ours.items()} == documented.metrics()
    assert [name for name, family in ours.items() if not family[2]] == []
    assert {f.name for f in classic_families(plain)} >= {"llm_steps", "llm_queue_depth"}
    for kind, field in (("input", "prompt_tokens"), ("output", "completion_tokens"), ("cached", "cached_tokens")):
        tokens = found["llm_tokens_total"][2]
        for tier in ("interactive", "batch"):
            assert tokens["llm_tokens_total", tier, kind] == sum(r[field] for r in records if r["lane"] == tier)
    assert sum(r["completion_tokens"] for r in records) == sum(len(a.token_ids) for a in answers) + 20
    assert found["llm_preemptions_total"][2]["llm_preemptions_total", "seat", "swap", "batch"] >= 1
    assert found["llm_swap_seconds_total"][2]["llm_swap_seconds_total", "out", "actual"] > 0
    assert found["llm_tenant_throttled_total"][2]["llm_tenant_throttled_total", "slow"] >= 1
    assert found["llm_worker_ready"][2]["llm_worker_ready",] == 1


def check_lines(worker: WorkerProcess) -> None:
    """One `request.finished` for each request, with the keys of docs/metrics.md; ids on a dead letter's line, too."""
    common, finished = documented.log_keys()
    lines = worker.logged("request.finished")
    assert len({line["correlation_id"] for line in lines}) == len(lines) == 4
    assert all(set(line) == common | finished for line in lines)
    (letter,) = worker.logged("request.dead_letter")
    assert common - {"attempt"} <= set(letter)
    assert (letter["lane"], letter["offset"]) == ("metrics.batch", 1)


async def running(port: int, tier: str) -> bool:
    return f'llm_sequences_running{{tier="{tier}"}} 1.0' in await page_of(port)


async def wait_for(condition: Callable[[], Any], limit: float = 60) -> Any:
    """What a condition gives, as soon as that is true."""
    end = time.monotonic() + limit
    while not (found := await condition()):
        assert time.monotonic() < end, f"not within {limit} s: {condition}"
        await asyncio.sleep(0.05)
    return found


@pytest.mark.broker
async def test_an_endpoint_that_is_away_changes_nothing(
    broker: EmbeddedBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Answers come, the log stays short, and the worker ends in its time."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{free_port()}")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "64")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "8")
    arguments = ("--lane-prefix", "deaf.", "--trace-steps", "1", "--metrics-port", "0")
    async with producing(broker.bootstrap, "deaf.", partitions=1):
        with WorkerProcess(broker.bootstrap, tmp_path / "w.log", *arguments) as worker:
            async with Client(broker.bootstrap, lane_prefix="deaf.") as client:
                answers = await asyncio.gather(*(client.complete(prompt="x", max_tokens=100) for _ in range(20)))
                await asyncio.sleep(2)
            assert len(answers) == 20
            assert worker.logged("telemetry.tracing") != []
            began = time.monotonic()
            assert worker.stop() == 0
            assert time.monotonic() - began < 10
    lines = (tmp_path / "w.log").read_text().splitlines()
    exporter = [line for line in lines if "opentelemetry" in line or "urllib3" in line]
    assert 1 <= len(exporter) <= 6, exporter
    assert "Traceback" not in (tmp_path / "w.log").read_text()


# Through the real collector into the real Jaeger

CALLER_TRACE, CALLER_SPAN = "5bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
CALLER = {"traceparent": f"00-{CALLER_TRACE}-{CALLER_SPAN}-01"}
REPLY = "send replies.{correlation_id}"
Written = list[tuple[str, list[str]]]  # event and every traceparent of the records of a topic


@contextlib.contextmanager
def stack(tmp_path: Path) -> Iterator[tuple[str, str]]:
    """Jaeger, and before it the collector with the very configuration that docker-compose mounts. Yields the addresses
    of the collector (OTLP over HTTP) and of Jaeger's query API."""
    try:
        jaeger, collector = tool("jaeger"), tool("otelcol")
    except Missing as reason:
        pytest.skip(str(reason))
    names = ("JAEGER_OTLP_GRPC_PORT", "JAEGER_OTLP_HTTP_PORT", "JAEGER_QUERY_PORT", "JAEGER_QUERY_GRPC_PORT")
    own = ("OTELCOL_OTLP_HTTP_PORT", "OTELCOL_OTLP_GRPC_PORT", "OTELCOL_HEALTH_PORT")
    ports = {name: str(free_port()) for name in (*names, *own)}
    target = {"JAEGER_OTLP_ENDPOINT": f"http://127.0.0.1:{ports['JAEGER_OTLP_HTTP_PORT']}"}
    programs = []
    try:
        for program, config in (
            (jaeger, ROOT.parent / "shared/tools/jaeger.yaml"),
            (collector, ROOT / "deploy/otel-collector.yaml"),
        ):
            with (tmp_path / f"{program.name}.log").open("w") as log:
                command = [str(program), "--config", str(config)]
                programs.append(subprocess.Popen(command, env=ports | target, stdout=log, stderr=log))
        query = f"http://127.0.0.1:{ports['JAEGER_QUERY_PORT']}"
        for address in (f"{query}/api/services", f"http://127.0.0.1:{ports['OTELCOL_HEALTH_PORT']}/"):
            wait_until_it_answers(address)
        yield f"http://127.0.0.1:{ports['OTELCOL_OTLP_HTTP_PORT']}", query
    finally:
        others.end(*programs)


def wait_until_it_answers(address: str) -> None:
    end = time.monotonic() + 30
    while True:
        try:
            with urllib.request.urlopen(address, timeout=5):
                return
        except (urllib.error.URLError, ConnectionError):
            assert time.monotonic() < end, f"{address} does not answer"
            time.sleep(0.1)


async def ask(address: str) -> dict[str, Any]:
    """What Jaeger knows; {} while that is nothing."""

    def fetch() -> dict[str, Any]:
        try:
            with urllib.request.urlopen(address, timeout=30) as response:
                return dict(json.loads(response.read()))
        except urllib.error.HTTPError as error:
            with error:
                return {}

    return await asyncio.to_thread(fetch)


class Span:
    """A span as Jaeger's API v3 gives it: OTLP in JSON."""

    def __init__(self, fields: dict[str, Any], resource: dict[str, Any]) -> None:
        self.name: str = fields["name"]
        self.id: str = fields["spanId"]
        self.kind: str = ("", "internal", "server", "client", "producer", "consumer")[fields["kind"]]
        self.tags = attributes_of(fields)
        self.service = attributes_of(resource)["service.name"]
        self.worker = attributes_of(resource).get("service.instance.id")
        self.parent = fields.get("parentSpanId")
        self.links = [(link["traceId"], link["spanId"]) for link in fields.get("links", ())]


def attributes_of(fields: dict[str, Any]) -> dict[str, Any]:
    found = {}
    for attribute in fields.get("attributes", ()):
        ((kind, value),) = attribute["value"].items()
        found[attribute["key"]] = int(value) if kind == "intValue" else value
    return found


async def spans_of(query: str, trace_id: str) -> list[Span]:
    found = await ask(f"{query}/api/v3/traces/{trace_id}")
    return [
        Span(fields, resource["resource"])
        for resource in found.get("result", {}).get("resourceSpans", ())
        for scope in resource["scopeSpans"]
        for fields in scope["spans"]
    ]


async def parents_of(query: str, trace_id: str) -> dict[str, str]:
    """Of each span, as the API says of which Jaeger's own page is made."""
    (trace,) = (await ask(f"{query}/api/traces/{trace_id}"))["data"]
    parents = [
        (s["spanID"], r["spanID"]) for s in trace["spans"] for r in s["references"] if r["refType"] == "CHILD_OF"
    ]
    assert len(dict(parents)) == len(parents)
    return dict(parents)


def pick(spans: list[Span], name: str, worker: str | None = None, **tags: object) -> Span:
    """The one span of that name, worker and tags (`_` for `.`)."""
    wanted = {key.replace("_", "."): value for key, value in tags.items()}
    found = [
        span
        for span in spans
        if span.name == name
        and (worker is None or span.worker == worker)
        and all(span.tags.get(key) == value for key, value in wanted.items())
    ]
    assert len(found) == 1, (name, worker, tags, [(s.name, s.worker, s.tags) for s in spans if s.name == name])
    return found[0]


@pytest.mark.kafka
@pytest.mark.shared
async def test_one_trace_through_a_preemption_and_a_crash(kafka: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A request with a traceparent is swapped out, its worker is killed, another one goes on (and swaps it out, too):
    Jaeger has one trace, the caller's, with every span and link of docs/metrics.md and the right parents."""
    with stack(tmp_path) as (endpoint, query):
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint)
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
        provider = TracerProvider(resource=Resource.create({"service.name": "caller"}), shutdown_on_exit=False)
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        monkeypatch.setattr(tracing, "_tracer", provider.get_tracer("test"))
        async with producing(kafka.bootstrap, "trace.", partitions=1) as producer:
            log = await live_through(kafka.bootstrap, producer, tmp_path)
            written = [await traceparents(kafka.bootstrap, topic) for topic in ("trace.batch", "trace.dlq")]
        await asyncio.to_thread(provider.shutdown)
        await wait_for(lambda: complete(query))
        spans = await spans_of(query, CALLER_TRACE)
        parents = await parents_of(query, CALLER_TRACE)
        steps = await ask(f"{query}/api/traces?service=carousel-worker&operation=llm.step&limit=1500")
    assert parents == {span.id: span.parent for span in spans}
    check_records(spans, *written, log)
    check_client(spans)
    check_second_worker(spans)
    check_first_worker(spans)
    second = pick(spans, "process trace.batch", "w2", llm_outcome="answered")
    links = [link for trace in steps["data"] for step in trace["spans"] for link in step["references"]]
    assert {"refType": "FOLLOWS_FROM", "traceID": CALLER_TRACE, "spanID": second.id} in links


async def traceparents(bootstrap: str, topic: str) -> Written:
    """In the order of the topic; only records of this trace, and all `tokens`."""
    consumer = LogConsumer(topic, bootstrap_servers=bootstrap, auto_offset_reset="earliest")
    await consumer.start()
    try:
        found = []
        ends = await consumer.end_offsets(consumer.assignment())
        while any([await consumer.position(p) < end for p, end in ends.items()]):
            for batch in (await consumer.getmany(timeout_ms=200)).values():
                for record in batch:
                    event = dict(record.headers).get("event", b"request").decode()
                    values = [value.decode() for name, value in record.headers if name == "traceparent"]
                    if event == "tokens" or any(CALLER_TRACE in value for value in values):
                        found.append((event, values))
        return found
    finally:
        await consumer.stop()


def check_records(spans: list[Span], requests: Written, letters: Written, log: Written) -> None:
    """One traceparent on request, `begin`, `end` and dead letter, each that of the span that wrote it (the letter keeps
    its own); none on `tokens`."""

    def of(span: Span) -> list[str]:
        return [f"00-{CALLER_TRACE}-{span.id}-01"]

    assert requests == [("request", of(pick(spans, "send trace.batch")))]
    assert letters == [("request", [CALLER["traceparent"]])]
    begun = [pick(spans, REPLY, worker, llm_event="begin") for worker in ("w1", "w2")]
    ended = pick(spans, REPLY, "w2", llm_event="end")
    assert [each for each in log if each[0] != "tokens"] == [
        *(("begin", of(span)) for span in begun),
        ("end", of(ended)),
    ]
    assert {tuple(values) for event, values in log if event == "tokens"} == {()}


async def complete(query: str) -> bool:
    """Whether the last spans have arrived."""
    names = [span.name for span in await spans_of(query, CALLER_TRACE)]
    return {"text_completion", "send trace.dlq"} <= set(names) and names.count("llm.preempted") == 2


async def live_through(bootstrap: str, producer: Any, tmp_path: Path) -> Written:
    """The request's life: preempted on w1, which is killed; resumed and preempted on w2. Returns its reply log."""
    arguments = ("--lane-prefix", "trace.", "--preemption", "swap", "--max-num-seqs", "1", "--trace-steps", "0.05")
    workers = [WorkerProcess(bootstrap, tmp_path / f"{n}.log", *arguments, "--worker", n) for n in ("w1", "w2")]
    request = {"prompt": "x" * 40, "tier": "batch", "max_tokens": 1500, "ignore_eos": True, "temperature": 0}
    urgent = {"prompt": "y", "tier": "interactive", "max_tokens": 10, "ignore_eos": True, "trace": {}}
    async with Client(bootstrap, lane_prefix="trace.") as client:
        workers[0].start()
        try:
            async with client.stream(**request, trace=CALLER) as stream:
                await tokens_beyond(stream, 5)
                await client.complete(**urgent)
                await tokens_beyond(stream, len(stream.log.token_ids[0]) + 5)
                await asyncio.sleep(1.0)  # what has ended is exported, on a busy machine too
                workers[0].kill()
                workers[1].start()
                num_known = len(stream.log.token_ids[0])
                assert num_known < 1400, "the request is over before its worker is"
                await tokens_beyond(stream, num_known + 5)
                await client.complete(**urgent)
                headers = [("traceparent", CALLER["traceparent"].encode()), ("reply_to", b"__nobody")]
                await producer._producer.send_and_wait("trace.standard", b"\xc1", headers=headers)
                answer = await stream.completion()
                log = await traceparents(bootstrap, f"replies.{stream.correlation_id}")
            assert len(answer.token_ids) == 1500
            assert await asyncio.to_thread(workers[1].stop) == 0
            return log
        finally:
            for worker in workers:
                worker.end()


async def tokens_beyond(stream: Any, number: int) -> None:
    """Reads the stream until it has so many tokens."""
    while len(stream.log.token_ids.get(0, ())) < number:
        assert isinstance(await anext(stream), Begin | Tokens)


def check_client(spans: list[Span]) -> None:
    call = pick(spans, "text_completion")
    assert (call.service, call.parent, call.kind) == ("caller", CALLER_SPAN, "client")
    sent, received = pick(spans, "send trace.batch"), pick(spans, "process replies.{correlation_id}")
    assert sent.parent == received.parent == call.id
    assert (sent.kind, received.kind) == ("producer", "consumer")
    assert received.links == [(CALLER_TRACE, pick(spans, REPLY, "w2", llm_event="end").id)]
    assert received.tags["llm.attempts"] == 2
    assert call.tags["gen_ai.usage.output_tokens"] == 1500


def check_second_worker(spans: list[Span]) -> None:
    sent, begun = pick(spans, "send trace.batch"), pick(spans, REPLY, "w1", llm_event="begin")
    process = pick(spans, "process trace.batch", "w2")
    assert (process.service, process.parent, process.kind) == ("carousel-worker", sent.id, "consumer")
    assert process.links == [(CALLER_TRACE, sent.id), (CALLER_TRACE, begun.id)]
    engine = next(span for span in spans if span.worker == "w2" and span.name.startswith("text_completion "))
    assert engine.parent == process.id
    assert 5 < engine.tags["llm.resumed_tokens"] < 1500
    ours = [span for span in spans if span.worker == "w2"]
    assert {s.name for s in ours if s.parent == process.id} == {"llm.queue", engine.name, REPLY}
    assert {s.name for s in ours if s.parent == engine.id} == {"llm.prefill", "llm.decode", "llm.preempted"}
    preempted, swapped = pick(spans, "llm.preempted", "w2"), pick(spans, "llm.swapped", "w2")
    assert swapped.parent == preempted.id
    assert preempted.tags["llm.preemption.mode"] == "swap"
    assert preempted.tags["llm.preemption.reason"] == "seat"
    assert preempted.tags["llm.preemption.blocks"] == swapped.tags["llm.preemption.blocks"] > 0
    buried = pick(spans, "send trace.dlq", "w2")
    refused = pick(spans, "process trace.standard", "w2")
    assert buried.parent == refused.id
    assert refused.parent == CALLER_SPAN


def check_first_worker(spans: list[Span]) -> None:
    """What had ended when it was killed; its `process` and engine spans had not, and are parents that nobody has."""
    theirs = [span for span in spans if span.worker == "w1"]
    assert {"llm.queue", "llm.prefill", "llm.decode", "llm.preempted", "llm.swapped", REPLY} == {s.name for s in theirs}
    known = {span.id for span in spans}
    process, engine = (pick(spans, name, "w1").parent for name in ("llm.queue", "llm.prefill"))
    assert not {process, engine} & known
    assert pick(spans, REPLY, "w1").parent == process
    assert pick(spans, "llm.preempted", "w1").parent == engine
    assert pick(spans, "llm.swapped", "w1").parent == pick(spans, "llm.preempted", "w1").id
