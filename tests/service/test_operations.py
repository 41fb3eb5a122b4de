"""The operators' commands against the embedded broker: cancel, status, dlq, reap."""

import asyncio
import gzip
import json
import time
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from schemas.dead_letters import dead_letter_headers
from schemas.records import (
    Cancel,
    InputRef,
    Tokens,
    decode_control,
)
from service.broker import EmbeddedBroker
from service.cli import app
from service.dead_letters import Position
from service.errors import NotAuthorized
from service.kafka import TopicAdmin
from service.lane_status import _OpenOffsets
from service.reply_logs import TopicLog, read_reply_logs
from service.topic_reader import TopicReader
from tests.service.operated import Cluster, begin, end, read_lane, request, usage_of

COMMANDS = [
    ["cancel", "x"],
    ["status"],
    ["dlq", "list"],
    ["dlq", "show", "0:0"],
    ["dlq", "redrive", "0:0"],
]


@pytest.mark.parametrize("command", [*COMMANDS, ["reap", "--older-than", "1h"]], ids=" ".join)
def test_no_broker_is_one_sentence(command: list[str]) -> None:
    """A Kafka that cannot be reached costs one line on stderr and the exit status 1."""
    result = CliRunner().invoke(app, [*command, "--bootstrap", "127.0.0.1:1"])
    assert result.exit_code == 1
    assert result.stderr.startswith("carousel: no Kafka at 127.0.0.1:1: ")
    assert result.stderr.count("\n") == 1


@pytest.mark.broker
@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_missing_topics_say_what_to_do(broker: EmbeddedBroker, command: list[str]) -> None:
    """Where there are no lanes, every command names the one that makes them."""
    result = CliRunner().invoke(app, [*command, "--bootstrap", broker.bootstrap, "--lane-prefix", "nowhere."])
    assert result.exit_code == 1
    assert "carousel topics create" in result.stderr


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        (["cancel", "replies.abc"], "its request's id is abc"),
        (["reap", "--older-than", "soon"], "for example 2h"),
        (["reap"], "--older-than"),
        (["dlq", "show", "first"], "PARTITION:OFFSET"),
        (["dlq", "redrive"], "--all"),
        (["dlq", "redrive", "0:1", "--all"], "--all"),
        (["dlq", "redrive", "0:1", "--reason", "internal"], "--all"),
    ],
)
def test_arguments_that_cannot_be(command: list[str], sentence: str) -> None:
    """A usage error says what would be right, and nothing is asked of Kafka."""
    result = CliRunner(env={"COLUMNS": "200"}).invoke(app, [*command, "--bootstrap", "127.0.0.1:1"])
    assert result.exit_code == 2
    assert sentence in result.output


@pytest.mark.parametrize(
    "command", [["cancel"], ["status"], ["dlq"], ["dlq", "list"], ["dlq", "show"], ["dlq", "redrive"], ["reap"]]
)
def test_help_teaches(command: list[str]) -> None:
    """Every command's help has an example, or lists its commands."""
    result = CliRunner(env={"COLUMNS": "120"}).invoke(app, [*command, "--help"])
    assert result.exit_code == 0
    assert "Example" in result.output or "redrive" in result.output


@pytest.mark.broker
def test_cancel_is_published(cluster: Cluster) -> None:
    """One control record per id, as any worker reads it."""
    result = cluster.carousel("cancel", "abc", "d.e-f")
    assert (result.exit_code, result.stdout.count("cancel published")) == (0, 2)
    records = read_lane(cluster, f"{cluster.lane_prefix}control")
    assert [decode_control(r.headers, r.value) for r in records] == [Cancel(b"abc"), Cancel(b"d.e-f")]


@pytest.mark.broker
def test_cancel_says_what_it_found(cluster: Cluster) -> None:
    """Of each id what its reply log told before; the cancel is published whatever that was."""
    cluster.write_log("running", begin("w9"), Tokens(0, 0, 0, (5, 6, 7), "abc"))
    cluster.write_log("ended", begin(), end())
    cluster.create(f"{cluster.reply_prefix}waiting")
    cluster.write_log("foreign", begin(), topic=f"{cluster.reply_prefix}broken")
    ids = ["running", "ended", "waiting", "broken", "nobody's"]
    unknown = (
        f"no open request with this id is known: there is no topic {cluster.reply_prefix}nobody's. It has ended, is "
        "still to come, or its replies go elsewhere"
    )
    result = cluster.carousel("cancel", *ids, replies=True)
    assert result.exit_code == 0
    words = [
        "it was running on w9, with 3 tokens",
        "it had ended before: stop",
        "no worker has begun it",
        f"its reply log {cluster.reply_prefix}broken holds what does not belong there",
        unknown,
    ]
    expected = [f"cancel published: {each} (kept 10 min); {found}" for each, found in zip(ids, words, strict=True)]
    assert result.stdout.splitlines() == expected
    assert f"{cluster.reply_prefix}nobody's" not in cluster.topics()


@pytest.mark.broker
@pytest.mark.parametrize("error", [NotAuthorized("not yours"), TimeoutError()])
def test_who_may_cancel_need_not_be_able_to_look(
    cluster: Cluster, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cancel is published, and the output says why nothing is known."""

    async def refuse(_reader: object) -> None:
        await asyncio.sleep(0.05)  # an answer takes its time; aiokafka 0.14 cannot stop what has not run yet
        raise error

    monkeypatch.setattr("service.control.TopicReader.topics", refuse)
    result = cluster.carousel("cancel", "abc")
    monkeypatch.undo()
    assert (result.exit_code, len(read_lane(cluster, f"{cluster.lane_prefix}control"))) == (0, 1)
    assert f"what is known of it could not be read: {str(error) or 'no answer in time'}" in result.stdout


@pytest.mark.broker
def test_status_tells_lag_age_and_open_requests(cluster: Cluster) -> None:
    """Records that are not done, oldest first, each with what its reply log says."""
    p = cluster.reply_prefix
    cluster.write_log("running", begin("w9"), Tokens(0, 0, 0, (5, 6, 7), "abc"))
    cluster.write_log("ended", begin(), end())
    cluster.create(f"{p}waiting", f"{p}team")
    now = round(time.time() * 1000)

    def record(request_id: str, topic: str, age: int, **headers: str) -> dict[str, Any]:
        named = {"correlation_id": request_id, "reply_to": topic} | headers
        pairs = [(name, value.encode()) for name, value in named.items()]
        return {"value": msgpack.packb({"prompt": "x"}), "headers": pairs, "timestamp_ms": now - age * 1000}

    cluster.send(
        f"{cluster.lane_prefix}standard",
        record("running", f"{p}running", 500, tenant="acme"),
        record("ended", f"{p}ended", 400),
        record("waiting", f"{p}waiting", 300),
        record("gone", f"{p}gone", 200),
        record("many", f"{p}team", 100),
        record("\x1b[2Jbad", "elsewhere", 50),
    )
    result = cluster.carousel("status", "--json", replies=True)
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    lanes = {lane["lane"]: lane for lane in found["lanes"]}
    assert lanes.keys() == {"interactive", "standard", "batch"}
    assert (lanes["standard"]["lag"], lanes["batch"]["lag"]) == (6, 0)
    assert 499 <= lanes["standard"]["oldest_age_s"] < 700
    assert lanes["batch"]["oldest_age_s"] is None
    assert [(each["correlation_id"], each["state"]) for each in found["requests"]] == [
        ("running", "running"),
        ("ended", "ended"),
        ("waiting", "waiting"),
        ("gone", "caller gone"),
        ("many", "shared log"),
        ("", "unanswerable"),
    ]
    first = found["requests"][0]
    assert (first["tenant"], first["worker"], first["num_tokens"]) == ("acme", "w9", 3)
    assert found["workers"] == []
    shown = cluster.carousel("status", "--requests", "2", replies=True).output
    assert "carousel worker" in shown
    assert "running" in shown
    assert "waiting" not in shown


@pytest.mark.broker
def test_status_knows_what_was_answered_out_of_order(cluster: Cluster) -> None:
    """A broker that keeps no done map: usage records tell which requests above the commit have been answered."""
    lane = f"{cluster.lane_prefix}standard"
    names = ["long", "answered", "next", "answered too", "last"]
    cluster.create(*(f"{cluster.reply_prefix}{name}" for name in ("long", "next", "last")))
    now = round(time.time() * 1000)
    sent = [request(name, f"{cluster.reply_prefix}{name}", partition=1, timestamp_ms=now) for name in names]
    cluster.send(lane, *sent)
    cluster.commit(lane, 1, 0, "1:")
    # The last one speaks of a request on a topic of the same name, deleted since.
    inputs = [InputRef(lane, 1, 1, now), InputRef(lane, 1, 3, now), InputRef(lane, 1, 2, now - 1)]
    cluster.send("usage", {"value": b"garbage"}, *map(usage_of, inputs))
    found = json.loads(cluster.carousel("status", "--json", replies=True).stdout)
    assert [each["correlation_id"] for each in found["requests"]] == ["long", "next", "last"]
    assert {each["lane"]: each["lag"] for each in found["lanes"]} == {"standard": 3, "interactive": 0, "batch": 0}


@pytest.mark.broker
def test_a_batch_is_seen_to_its_end(cluster: Cluster) -> None:
    """Lag, dead letters, usage records and an answer whose last batch holds several records (the broker's LIMITS)."""
    lane, dlq, topic = f"{cluster.lane_prefix}standard", f"{cluster.lane_prefix}dlq", f"{cluster.reply_prefix}0"
    now = round(time.time() * 1000)
    cluster.send_batch(lane, *(request(str(n), f"{cluster.reply_prefix}{n}", timestamp_ms=now) for n in range(5)))
    source = InputRef(lane, 0, 0, 0)
    letter = {"value": b"x", "headers": dead_letter_headers([], source, "internal", "m")}
    cluster.send_batch(dlq, *[letter] * 5)
    cluster.create(topic)
    answer = [begin(), *(Tokens(0, 0, n, (n,), "a") for n in range(3)), end()]
    cluster.send_batch(topic, *(cluster.log_record("0", record) for record in answer))

    def status() -> tuple[int, list[tuple[str, int]]]:
        found = json.loads(cluster.carousel("status", "--json", replies=True).stdout)
        lags = {each["lane"]: each["lag"] for each in found["lanes"]}
        return lags["standard"], [(each["state"], each["num_tokens"]) for each in found["requests"]]

    assert status() == (5, [("ended", 3)] + [("caller gone", 0)] * 4)
    cluster.commit(lane, 0, 0, "1:")
    cluster.send_batch("usage", *(usage_of(InputRef(lane, 0, n, now)) for n in range(1, 5)))
    assert status() == (1, [("ended", 3)])
    assert len(json.loads(cluster.carousel("dlq", "list", "--json").stdout)) == 5
    assert "reason: internal" in cluster.carousel("dlq", "show", "0:4").stdout
    assert "0 to 4" in cluster.carousel("dlq", "show", "0:5").stderr
    assert cluster.carousel("dlq", "redrive", "0:4").exit_code == 0
    assert "5 dead letters redriven" in cluster.carousel("dlq", "redrive", "--all", "--yes").stdout
    assert len(read_lane(cluster, lane)) == 5 + 1 + 5
    reaped = cluster.carousel("reap", "--older-than", "0s", "--yes", replies=True)
    assert topic not in cluster.topics(), reaped.output


@pytest.mark.broker
def test_status_forgets_what_is_answered_while_it_looks(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer's reply topic is deleted before it is read: the request is neither waiting nor without a caller."""
    lane = f"{cluster.lane_prefix}standard"
    cluster.create(f"{cluster.reply_prefix}answered", f"{cluster.reply_prefix}waiting")
    cluster.send(lane, *(request(n, f"{cluster.reply_prefix}{n}", partition=1) for n in ("answered", "waiting")))
    cluster.commit(lane, 1, 0, "1:")

    async def read(reader: TopicReader, topics: set[str], prefix: str) -> dict[str, TopicLog]:
        async with TopicAdmin(cluster.connection) as admin:
            await admin.delete([f"{cluster.reply_prefix}answered"])
        await cluster.committing(lane, 1, 1, "1:")
        return await read_reply_logs(reader, topics, prefix)

    monkeypatch.setattr("service.lane_status.read_reply_logs", read)
    found = json.loads(cluster.carousel("status", "--json", replies=True).stdout)
    assert [(each["correlation_id"], each["state"]) for each in found["requests"]] == [("waiting", "waiting")]


@given(st.sets(st.integers(0, 12)), st.integers(0, 12), st.sets(st.integers(0, 15)))
def test_what_is_open_without_what_is_done(known: set[int], rest: int, done: set[int]) -> None:
    """As plain sets have it, and no offset is counted twice."""
    before = _OpenOffsets(frozenset(offset for offset in known if offset < rest), rest, 12)
    expected = {offset for offset in range(16) if offset in before} - done
    after = before.without(done)
    assert {offset for offset in range(16) if offset in after} == expected
    assert after.count == len(expected)
    assert not expected or after.first == min(expected)


@pytest.mark.broker
def test_dead_letters_are_listed_shown_and_redriven(cluster: Cluster) -> None:
    """A redriven record is back on its lane with the key, value and headers that its producer gave it."""
    lane = f"{cluster.lane_prefix}batch"
    own = [("correlation_id", b"abc"), ("kafka_dlt-original-topic", b"__consumer_offsets")]
    value = msgpack.packb({"prompt": "secret"})
    source = InputRef(lane, 1, 41, 1_700_000_000_000)
    letters = [
        {"key": b"k", "value": value, "headers": dead_letter_headers(own, source, "internal", "it\x1b[2J broke")},
        {"value": b"\xff\xfe", "headers": dead_letter_headers([], source, "invalid_request", "no map")},
        {"value": value, "headers": dead_letter_headers([], InputRef("usage", 0, 0, 0), "internal", "hm")},
    ]
    cluster.send(f"{cluster.lane_prefix}dlq", *letters)

    listed = json.loads(cluster.carousel("dlq", "list", "--json").stdout)
    assert [each["reason"] for each in listed] == ["internal", "invalid_request", "internal"]
    assert listed[0]["source"] == f"{lane}/1:41"
    table = cluster.carousel("dlq", "list", "--reason", "internal").output
    assert "abc" in table
    assert "secret" not in table
    assert "\x1b[2J" not in table
    assert "invalid_request" not in table

    shown = cluster.carousel("dlq", "show", "0:0").output
    assert '"prompt": "secret"' in shown
    assert "kafka_dlt-original-offset: 41" in shown
    assert json.loads(cluster.carousel("dlq", "show", "1", "--json").stdout)["value"] == "0xfffe"
    assert "0 to 2" in cluster.carousel("dlq", "show", "0:99").stderr

    dry = cluster.carousel("dlq", "redrive", "--all", "--reason", "invalid_request")
    assert "would redrive 0:1" in dry.output
    assert json.loads(cluster.carousel("status", "--json").stdout)["lanes"][0]["lag"] == 0
    assert "did not come from a lane" in cluster.carousel("dlq", "redrive", "0:0", "0:2").stderr
    assert json.loads(cluster.carousel("status", "--json").stdout)["lanes"][0]["lag"] == 0
    done = cluster.carousel("dlq", "redrive", "0:0")
    assert done.stdout == f"redriven 0:0 to {lane}\n"
    (record,) = read_lane(cluster, lane)
    assert (record.key, record.value, list(record.headers)) == (b"k", value, own)


GZIPPED = gzip.compress(b"no request")
ODD_RECORDS: list[tuple[bytes | None, bytes | None, list[tuple[str, bytes | None]]]] = [
    (None, b"{ not JSON", []),
    (b"k\x00\xff", bytes(range(256)), [("correlation_id", b"a"), ("x", b"\xff\x00")]),
    (b"", b"", [("reply_to", b"replies.a"), ("reply_to", b"replies.b"), ("empty", b""), ("null", None)]),
    (b"k", msgpack.packb([1, {"prompt": "x"}]), [("content-type", b"text/plain")]),
    (b"k", GZIPPED[:-4], [("content-encoding", b"gzip"), ("dlq_reason", b"its own"), ("truncated_from", b"its own")]),
    (b"k", None, []),
    (None, None, [("reply_to", b"replies.a"), ("dlq_message", b"its own")]),
]


@pytest.mark.broker
def test_a_redriven_record_has_the_bytes_that_it_had(cluster: Cluster) -> None:
    """Whatever they are: no JSON, no map, compressed, empty, null, no headers, several of one name, some like ours."""
    lane = f"{cluster.lane_prefix}batch"
    source = InputRef(lane, 0, 41, 1_700_000_000_000)
    for key, value, headers in ODD_RECORDS:
        letter = dead_letter_headers(headers, source, "internal", "m", f"00-{'1' * 32}-{'2' * 16}-01")  # type: ignore[arg-type]
        cluster.send(f"{cluster.lane_prefix}dlq", {"key": key, "value": value, "headers": letter})
    positions = [f"0:{offset}" for offset in range(len(ODD_RECORDS))]
    for position in positions:
        assert cluster.carousel("dlq", "show", position).exit_code == 0
    done = cluster.carousel("dlq", "redrive", *positions)
    assert (done.exit_code, done.stderr) == (0, ""), done.output
    records = read_lane(cluster, lane)
    found = [(record.key, record.value, list(record.headers)) for record in records]
    assert sorted(found, key=repr) == sorted(ODD_RECORDS, key=repr)


@pytest.mark.broker
def test_what_is_not_all_there_is_not_redriven(cluster: Cluster) -> None:
    """A worker has cut it, or found nothing in it: a sentence says which, also without --yes; nothing is published."""
    source = InputRef(f"{cluster.lane_prefix}batch", 0, 41, 0)
    ours = dead_letter_headers([("correlation_id", b"a")], source, "internal", "m")
    cuts = [[("truncated_from", b"9")], [("truncated_key_from", b"8"), ("truncated_headers_from", b"7")]]
    letters = [{"value": b"x", "headers": [*ours, *cut]} for cut in cuts]
    nothing = {"value": None, "headers": dead_letter_headers([], source, "reply_to_missing", "m")}
    cluster.send(f"{cluster.lane_prefix}dlq", {"value": b"x", "headers": ours}, *letters, nothing)
    words = [
        "0:1 did not fit on the dead-letter topic, and is not all there: its value had 9 bytes",
        "0:2 did not fit on the dead-letter topic, and is not all there: its key had 8 bytes, its headers had 7 bytes",
        "0:3 holds nothing: the record was empty, or could not even be read",
    ]
    for offset, sentence in enumerate(words, 1):
        refused = cluster.carousel("dlq", "redrive", "0:0", f"0:{offset}")
        assert (refused.exit_code, refused.stdout, refused.stderr) == (1, "", f"carousel: {sentence}\n")
    assert read_lane(cluster, source.topic) == []
    skipped = "".join(f"skipped: {sentence}\n" for sentence in words)
    dry = cluster.carousel("dlq", "redrive", "--all")
    assert (dry.exit_code, dry.stderr) == (1, skipped)
    assert dry.stdout.splitlines()[-1] == "1 dead letters, 3 skipped; --yes redrives them"
    assert read_lane(cluster, source.topic) == []
    done = cluster.carousel("dlq", "redrive", "--all", "--yes")
    assert (done.exit_code, done.stderr) == (1, skipped)
    assert done.stdout == f"redriven 0:0 to {source.topic}\n1 dead letters redriven, 3 skipped\n"
    assert len(read_lane(cluster, source.topic)) == 1
    none = cluster.carousel("dlq", "redrive", "--all", "--reason", "nosuch", "--yes")
    assert (none.exit_code, none.output) == (0, "no dead letters with reason nosuch\n")


@pytest.mark.broker
def test_the_newest_of_a_reason_are_those_with_that_reason(cluster: Cluster) -> None:
    """However many others came after them."""
    ours = [dead_letter_headers([], InputRef("t", 0, 0, 0), reason, "m") for reason in "aaaabb"]
    cluster.send(f"{cluster.lane_prefix}dlq", *({"value": b"x", "headers": headers} for headers in ours))
    found = json.loads(cluster.carousel("dlq", "list", "--limit", "2", "--reason", "a", "--json").stdout)
    assert [each["position"] for each in found] == ["0:2", "0:3"]
    found = json.loads(cluster.carousel("dlq", "list", "--limit", "3", "--json").stdout)
    assert [each["position"] for each in found] == ["0:3", "0:4", "0:5"]


@pytest.mark.broker
@pytest.mark.parametrize(("raw", "shown"), [(None, "null"), (b"", '""'), (b"null", '"null"')])
def test_nothing_is_not_shown_as_empty(cluster: Cluster, raw: bytes | None, shown: str) -> None:
    headers = dead_letter_headers([], InputRef("t", 0, 0, 0), "internal", "m")
    cluster.send(f"{cluster.lane_prefix}dlq", {"key": raw, "value": raw, "headers": headers})
    lines = cluster.carousel("dlq", "show", "0:0").stdout.splitlines()
    assert f"key: {shown}" in lines
    assert lines[-1] == f"value: {shown}"


@pytest.mark.broker
def test_what_a_producer_wrote_moves_no_terminal_and_named_twice_is_sent_once(cluster: Cluster) -> None:
    """Names of headers, and what JSON leaves as it is: 8-bit controls, directions, DEL."""
    wild = "\x1b]0;owned\x07\x9b31m\u202e\x7f"
    lane = f"{cluster.lane_prefix}standard"
    headers = dead_letter_headers([(wild, wild.encode())], InputRef(lane, 0, 0, 0), "internal", wild)
    value = json.dumps({"prompt": wild, wild: 1}, ensure_ascii=False).encode()
    cluster.send(f"{cluster.lane_prefix}dlq", {"key": wild.encode(), "value": value, "headers": headers})
    for options in (), ("--json",):
        shown = cluster.carousel("dlq", "show", "0:0", *options).stdout
        assert "owned" in shown
        assert all(c.isprintable() or c == "\n" for c in shown)
    redriven = cluster.carousel("dlq", "redrive", "0:0", "0", "0:0").stdout
    assert redriven.splitlines() == [f"redriven 0:0 to {lane}"]


@pytest.mark.parametrize(("text", "position"), [("3:17", Position(3, 17)), ("17", Position(0, 17))])
def test_positions(text: str, position: Position) -> None:
    """PARTITION:OFFSET; the partition may be left out."""
    assert Position.parse(text) == position


@pytest.mark.parametrize("text", ["", ":", "a:1", "1:", ":1", "-1:2", "1:2:3"])
def test_positions_that_are_none(text: str) -> None:
    """Anything else is refused with an example."""
    with pytest.raises(ValueError, match="PARTITION:OFFSET"):
        Position.parse(text)


@pytest.mark.broker
def test_reap_deletes_what_has_ended_and_nothing_else(cluster: Cluster) -> None:
    """Old and ended goes, with --yes only. Young, open, unused, shared and foreign topics stay."""
    p = cluster.reply_prefix
    old = cluster.write_log("old", begin(), Tokens(0, 0, 0, (5,), "a"), end(), age=7200)
    refused = cluster.write_log("refused", end(-1), age=9000)
    cluster.write_log("young", begin(), end(), age=600)
    cluster.write_log("open", begin(), Tokens(0, 0, 0, (5,), "a"), age=7200)
    cluster.write_log("zombie", begin(), begin("w2"), end(0), age=7200)  # the end is a fenced attempt's
    cluster.write_log("somebody", begin(), end(), age=7200, topic=f"{p}shared")
    outside = cluster.write_log("outside", begin(), end(), age=7200, topic=f"other{cluster.name}.outside")
    cluster.create(f"{p}unused")
    cluster.create(f"{p}wide", partitions=3)
    before = cluster.topics()

    dry = cluster.carousel("reap", "--older-than", "1h", replies=True)
    assert dry.exit_code == 0, dry.output
    assert f"would delete {old} (ended 2.0 h ago)" in dry.output
    assert "2 topics; --yes deletes them" in dry.output
    assert cluster.topics() == before
    done = cluster.carousel("reap", "--older-than", "1h", "--yes", "--json", replies=True)
    found = json.loads(done.stdout)
    assert found["deleted"] is True
    assert found["ended"].keys() == {old, refused}
    assert found["kept"] == {"young": 1, "open": 2, "unused": 1, "shared": 2}
    assert before - cluster.topics() == {old, refused}
    assert outside in cluster.topics()
    again = cluster.carousel("reap", "--older-than", "1h", "--yes", replies=True)
    assert "nothing under" in again.output


@pytest.mark.broker
@pytest.mark.parametrize("prefix", ["", "with space"])
def test_reap_refuses_a_prefix_that_is_none(broker: EmbeddedBroker, prefix: str) -> None:
    """An empty prefix would be everything."""
    arguments = ["reap", "--older-than", "1s", "--yes", "--reply-prefix", prefix, "--bootstrap", broker.bootstrap]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 1
    assert "no reply prefix" in result.stderr


@pytest.mark.broker
def test_reap_never_touches_lanes(cluster: Cluster) -> None:
    """Not even with a prefix that covers them, and records in them that look like an answer."""
    lane = f"{cluster.lane_prefix}standard"
    name = cluster.lane_prefix.removesuffix(".")
    before = cluster.topics()
    cluster.write_log("x", begin(), end(), age=7200, topic=lane)
    arguments = ["reap", "--older-than", "1s", "--yes", "--reply-prefix", name]
    result = cluster.carousel(*arguments)
    assert result.exit_code == 0, result.output
    assert cluster.topics() >= before
