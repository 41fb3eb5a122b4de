"""The verdict on a fault campaign, from what lies on the brokers: no word of a worker is believed.

Every reply log is read again from its start, by the reader rule of ../shared/checks/reader.py, and compared with the
answer of an undisturbed run.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgpack
from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient

from bench.fleet import Member
from bench.traffic import LANES, Kind, Sent
from schemas.connection import KafkaConnection
from service.kafka import TopicAdmin

GRACE_S = 20.0  # a cancel or a deadline may take a fault's time to be heard of
_AT_ONCE = 200  # reply topics that one reading takes on
_SHOWN = 20


@dataclass(frozen=True, slots=True)
class Answer:
    """What a caller has in the end, by choice."""

    token_ids: dict[int, list[int]]
    text: dict[int, str]
    reasons: list[str]
    error: str | None

    @classmethod
    def of(cls, stream: Any) -> "Answer":
        """Of a stream that has ended."""
        end = stream.end
        reasons = end["finish_reason"]
        reasons = [reasons] if isinstance(reasons, str) else list(reasons)
        error = (end.get("error") or {}).get("code")
        if end.get("choices"):
            choices = enumerate(end["choices"])
            parts = [(i, list(c["token_ids"]), c["text"]) for i, c in choices]
            return cls({i: t for i, t, _ in parts}, {i: x for i, _, x in parts}, reasons, error)
        tokens = {int(choice): list(ids) for choice, ids in stream.token_ids.items()}
        text = {int(choice): text for choice, text in stream.text.items() if text}
        return cls(tokens, text, reasons, error)

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.token_ids.values()))


@dataclass(slots=True)
class Verdict:
    """What must be nothing, each with its cases; and what is merely counted."""

    faults: dict[str, list[str]] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)

    NAMES = (
        "lost requests",
        "tokens missing, doubled or changed",
        "wrong finishes",
        "answers that differ from the undisturbed run",
        "unbilled or wrongly billed",
        "dead letters",
        "blocks leaked",
        "partitions not committed to their end",
        "reply topics left over",
        "calls of the client that failed",
        "workers that died by themselves",
    )

    def add(self, name: str, case: str) -> None:
        assert name in self.NAMES, name
        self.faults.setdefault(name, []).append(case)

    @property
    def passed(self) -> bool:
        return not self.faults

    def to_fields(self) -> dict[str, Any]:
        return {
            "passed": self.passed,
            "faults": {name: len(self.faults.get(name, ())) for name in self.NAMES},
            "cases": {name: cases[:_SHOWN] for name, cases in self.faults.items()},
            "counts": dict(self.counts),
        }


async def read_again(bootstrap: str, sent: Sequence[Sent], reader: Any, verdict: Verdict) -> dict[bytes, Any]:
    """Correlation id -> the stream that an independent reader has of it, read from offset 0 to the log's end."""
    streams: dict[bytes, Any] = {s.correlation_id: reader.Stream() for s in sent}
    topics = sorted({s.topic for s in sent})
    consumer = AIOKafkaConsumer(bootstrap_servers=bootstrap, enable_auto_commit=False, auto_offset_reset="earliest")
    await consumer.start()
    try:
        for start in range(0, len(topics), _AT_ONCE):
            partitions = [TopicPartition(topic, 0) for topic in topics[start : start + _AT_ONCE]]
            await _read_to_end(consumer, partitions, streams, reader, verdict)
    finally:
        await consumer.stop()
    return streams


async def _read_to_end(
    consumer: Any, partitions: list[TopicPartition], streams: Mapping[bytes, Any], reader: Any, verdict: Verdict
) -> None:
    consumer.assign(partitions)
    await consumer.seek_to_beginning(*partitions)
    ends = await consumer.end_offsets(partitions)
    left = {p for p in partitions if ends[p] > 0}
    while left:
        for partition, records in (await consumer.getmany(timeout_ms=200)).items():
            for record in records:
                try:
                    event, value, headers = reader.decode(record)
                    streams[headers["correlation_id"]].feed(record.offset, event, value, headers)
                except Exception as error:
                    verdict.add("tokens missing, doubled or changed", f"{record.topic}: {error!r}")
            if records[-1].offset + 1 >= ends[partition]:
                left.discard(partition)


def judge_answers(
    sent: Sequence[Sent], streams: Mapping[bytes, Any], expected: Mapping[int, Answer], verdict: Verdict
) -> None:
    """Compares every answer with that of the undisturbed run."""
    for request in sent:
        stream, name = streams[request.correlation_id], f"{request.topic} ({request.correlation_id.decode()})"
        verdict.counts["requests"] += 1
        verdict.counts["attempts"] += len(stream.attempts)
        verdict.counts["resumed requests"] += len(stream.attempts) > 1
        verdict.counts["records of attempts that were fenced"] += stream.skipped
        verdict.counts["tokens repeated by a producer"] += stream.repeated
        if stream.end is None:
            verdict.add("lost requests", f"{name} on {request.lane}, attempts {stream.attempts}")
            continue
        answer = Answer.of(stream)
        verdict.counts["tokens"] += answer.num_tokens
        verdict.counts[f"finished: {answer.reasons[0]}"] += 1
        if request.fault:
            verdict.add("tokens missing, doubled or changed", f"{name}: {request.fault}")
        _judge(request, answer, expected[request.kind.number], stream, name, verdict)


def _judge(request: Sent, answer: Answer, expected: Answer, stream: Any, name: str, verdict: Verdict) -> None:
    cut = [reason for reason in answer.reasons if reason in ("cancelled", "deadline")]
    usage = (stream.end.get("usage") or {}).get("completion_tokens")
    if usage != answer.num_tokens:
        verdict.add("wrong finishes", f"{name}: usage says {usage} tokens, there are {answer.num_tokens}")
    if cut and not _may_be_cut(request, cut):
        verdict.add("wrong finishes", f"{name}: {answer.reasons}, which nobody asked for")
    if not cut and answer.reasons != expected.reasons and request.kind.repeatable:
        verdict.add("wrong finishes", f"{name}: {answer.reasons}, undisturbed {expected.reasons}")
    if answer.error != expected.error:
        verdict.add("wrong finishes", f"{name}: error {answer.error}, undisturbed {expected.error}")
    if not request.kind.repeatable:
        if not cut and {c: len(t) for c, t in answer.token_ids.items()} != {
            c: len(t) for c, t in expected.token_ids.items()
        }:
            verdict.add("tokens missing, doubled or changed", f"{name}: {answer.num_tokens} tokens")
        return
    for choice, ids in answer.token_ids.items():
        whole = expected.token_ids.get(choice, [])
        if ids != whole[: len(ids)] or (not cut and len(ids) != len(whole)):
            verdict.add("tokens missing, doubled or changed", f"{name}: choice {choice}, {len(ids)} of {len(whole)}")
    if not cut and (answer.token_ids != expected.token_ids or answer.text != expected.text):
        verdict.add("answers that differ from the undisturbed run", name)


def _may_be_cut(request: Sent, reasons: Sequence[str]) -> bool:
    return all(
        request.cancelled_at is not None if reason == "cancelled" else request.deadline is not None
        for reason in reasons
    )


def judge_cuts(
    sent: Sequence[Sent],
    streams: Mapping[bytes, Any],
    ended_at: Mapping[bytes, float],
    served_until: Mapping[bytes, float],
    verdict: Verdict,
) -> None:
    """No request runs to its natural end long after it was cancelled, or its deadline. Times are Unix times, of the end
    and of the last tokens: where all tokens were there already, a new owner may find that out late.
    """
    for request in sent:
        limits = [t for t in (request.cancelled_at, request.deadline) if t is not None]
        end, ended = streams[request.correlation_id].end, ended_at.get(request.correlation_id)
        if not limits or end is None or ended is None:
            continue
        late = ended - min(limits)
        verdict.counts["seconds from cancel or deadline to the end, at most"] = max(
            verdict.counts["seconds from cancel or deadline to the end, at most"], round(late)
        )
        late = served_until.get(request.correlation_id, ended) - min(limits)
        if late > GRACE_S and not {"cancelled", "deadline", "error"} & set(
            Answer.of(streams[request.correlation_id]).reasons
        ):
            verdict.add("wrong finishes", f"{request.topic}: ran to its end, {late:.1f} s after it should have stopped")


async def judge_topics(bootstrap: str, sent: Sequence[Sent], verdict: Verdict) -> None:
    """The DLQ is empty, and every request has a usage record; records of one input agree."""
    dead = await all_records(bootstrap, "prompts.dlq")
    for record in dead:
        headers = dict(record.headers)
        verdict.add("dead letters", f"{headers.get('dlq_reason')}: {headers.get('dlq_message')}"[:300])
    billed: dict[bytes, set[tuple[Any, ...]]] = {}
    for record in await all_records(bootstrap, "usage"):
        value = msgpack.unpackb(record.value)
        raw = value["correlation_id"]
        correlation_id = raw if isinstance(raw, bytes) else raw.encode()
        billed.setdefault(correlation_id, set()).add((tuple(value["input"]), value["completion_tokens"]))
        verdict.counts["usage records"] += 1
    for request in sent:
        bills = billed.get(request.correlation_id, set())
        # On a shared log a new attempt starts over, and may find that the request was cancelled meanwhile.
        may_differ = request.kind.shared and (request.cancelled_at or request.deadline)
        if not bills or len({where for where, _ in bills}) > 1 or (len(bills) > 1 and not may_differ):
            verdict.add("unbilled or wrongly billed", f"{request.topic}: {sorted(map(str, bills))}")


async def all_records(bootstrap: str, topic: str) -> list[Any]:
    consumer = AIOKafkaConsumer(bootstrap_servers=bootstrap, enable_auto_commit=False, auto_offset_reset="earliest")
    await consumer.start()
    try:
        partition = TopicPartition(topic, 0)
        consumer.assign([partition])
        await consumer.seek_to_beginning(partition)
        end = (await consumer.end_offsets([partition]))[partition]
        records: list[Any] = []
        while end and (not records or records[-1].offset + 1 < end):
            for batch in (await consumer.getmany(timeout_ms=200)).values():
                records += batch
        return records
    finally:
        await consumer.stop()


async def judge_commits(bootstrap: str, verdict: Verdict, timeout: float = 30.0) -> None:
    """Every lane's group has committed the end of every partition."""
    admin = AIOKafkaAdminClient(bootstrap_servers=bootstrap)
    consumer = AIOKafkaConsumer(bootstrap_servers=bootstrap)
    await admin.start()
    await consumer.start()
    try:
        stop = time.monotonic() + timeout
        while behind := await _behind(admin, consumer):
            if time.monotonic() > stop:
                for case in behind:
                    verdict.add("partitions not committed to their end", case)
                return
            await asyncio.sleep(0.5)
    finally:
        await consumer.stop()
        await admin.close()


async def _behind(admin: AIOKafkaAdminClient, consumer: Any) -> list[str]:
    cases = []
    for lane in LANES:
        topic = f"prompts.{lane}"
        described = await admin.describe_topics([topic])
        partitions = [TopicPartition(topic, p["partition"]) for p in described[0]["partitions"]]
        ends = await consumer.end_offsets(partitions)
        committed = await admin.list_consumer_group_offsets(f"carousel.{topic}", partitions=partitions)
        for partition in partitions:
            at = committed[partition].offset if partition in committed else -1
            if max(at, 0) != ends[partition]:
                cases.append(f"{topic}-{partition.partition}: {at} of {ends[partition]}")
    return cases


def judge_blocks(members: Sequence[Member], verdict: Verdict, since: float) -> None:
    """After one-block probes, a worker's last step holds one block for each that ran in it.

    since: time.monotonic() when the probes began. A worker that owns no partition got none, and its last step may be
    that of a process killed in the middle of its work.
    """
    for member in members:
        step = member.last_step()
        if step is None or step["at"] < since:
            continue
        verdict.counts["workers whose blocks were counted"] += 1
        if step["num_blocks_used"] > step["num_running"]:
            verdict.add("blocks leaked", f"{member.name}: {step['num_blocks_used']} for {step['num_running']} running")


async def judge_leftovers(connection: KafkaConnection, verdict: Verdict, wait: float = 2.0) -> None:
    """After the callers have deleted theirs, no reply topic is there, nor comes back."""
    async with TopicAdmin(connection) as admin:
        await asyncio.sleep(wait)
        for topic in sorted(await admin.list()):
            if topic.startswith("replies."):
                verdict.add("reply topics left over", topic)


def expected_answers(kinds: Sequence[Kind], sent: Sequence[Sent]) -> dict[int, Answer]:
    """Kind -> answer, from an undisturbed run. Raises ValueError when one of them did not end."""
    for request in sent:
        if request.stream.end is None:
            raise ValueError(f"kind {request.kind.number} has no end without any fault: {request.fault}")
    answers = {request.kind.number: Answer.of(request.stream) for request in sent}
    assert set(answers) == {kind.number for kind in kinds}
    return answers
