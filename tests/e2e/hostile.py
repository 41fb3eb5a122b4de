"""Records that a malicious producer writes, drawn from a seed: fuzzed headers, bodies that lie, names that mislead."""

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import msgpack

Headers = list[tuple[str, bytes | None]]
HEADER_NAMES = (
    *("correlation_id", "reply_to", "reply_partition", "tenant", "priority", "deadline_ms", "content-type", "accept"),
    *("traceparent", "tracestate", "baggage", "kafka_correlationId", "kafka_replyTopic", "kafka_replyPartition"),
    *("REPLY_CORRELATION_ID", "REPLY_TOPIC", "REPLY_PARTITION", "ce_id", "ce_correlationid", "", "event", "x" * 300),
)
FIELDS = (
    *("prompt", "messages", "token_ids", "model", "max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "stop", "stop_token_ids", "seed"),
    *("ignore_eos", "n", "logprobs", "stream", "user", "max_token", "", "\x00"),
)


@dataclass(frozen=True, slots=True)
class Record:
    value: bytes | None
    headers: Headers
    key: bytes | None = None
    timestamp_ms: int | None = None


@dataclass(slots=True)
class Hostility:
    """A stream of records. `logs`: reply topics that exist; `forbidden`: topics that nobody may be answered on."""

    seed: int
    logs: list[str]
    forbidden: list[str]
    _rng: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self._rng = random.Random(self.seed)

    def records(self, number: int) -> Iterator[Record]:
        kinds: list[Callable[[], Record]] = [
            *[self._noise] * 3,
            *[self._fuzzed_headers] * 4,
            *[self._misleading_name] * 3,
            *[self._confused_types] * 5,
            *[self._damaged] * 4,
            *[self._nested] * 2,
            *[self._lengths_that_lie] * 2,
            self._odd_json,
        ]
        for i in range(number):
            yield self._giant() if i % 100 == 99 else self._rng.choice(kinds)()

    # What a record is made of

    def _bytes(self, most: int) -> bytes:
        return self._rng.randbytes(self._rng.randint(0, most))

    def _address(self) -> Headers:
        name = b"%032x" % self._rng.getrandbits(128)
        return [("correlation_id", name), ("reply_to", self._rng.choice(self.logs).encode())]

    def _body(self) -> dict[str, Any]:
        return {"prompt": "x" * self._rng.randint(1, 30), "max_tokens": self._rng.randint(1, 4), "temperature": 0}

    def _junk(self, depth: int = 0) -> Any:
        rng = self._rng
        simple: list[Any] = [
            *(None, True, -1, 0, 1, 17, 2**31, 2**63 - 1, -(2**63), 2**64 - 1, 0.5, -0.0, 1e308, float("nan")),
            *(float("inf"), "", "\x00", "a", "\ud7ff", "x" * 5000, b"", b"\xff", [], {}, [[]], {"role": "user"}),
        ]
        if depth < 3 and rng.random() < 0.3:
            inner = [self._junk(depth + 1) for _ in range(rng.randint(1, 4))]
            return inner if rng.random() < 0.5 else {str(i): value for i, value in enumerate(inner)}
        return rng.choice(simple)

    # Kinds of records

    def _noise(self) -> Record:
        return Record(self._bytes(200), self._address(), self._bytes(20))

    def _fuzzed_headers(self) -> Record:
        values = (
            b"",
            b"\xff\xfe",
            b"0",
            b"-1",
            b"9" * 40,
            b"application/json",
            b"00-0-0-01",
            b"\x00\x00\x00\x01",
            None,
        )
        headers: Headers = self._address()
        for _ in range(self._rng.randint(1, 12)):
            value = self._rng.choice([*values, self._bytes(30), self._bytes(300)])
            headers.insert(self._rng.randint(0, len(headers)), (self._rng.choice(HEADER_NAMES), value))
        return Record(msgpack.packb(self._body()), headers, timestamp_ms=self._rng.choice([None, 0, 1]))

    def _misleading_name(self) -> Record:
        names = [
            *self.forbidden,
            "__consumer_offsets",
            "__x",
            "..",
            ".",
            "",
            "replies",
            "Replies.x",
            "replies." + "x" * 300,
        ]
        names += ["replies.\x00", "replies./../x", "replies.é", " replies.x", "usage", "replies.\n"]
        topic = self._rng.choice(names).encode()
        name = self._rng.choice(["reply_to", "kafka_replyTopic", "REPLY_TOPIC"])
        return Record(msgpack.packb(self._body()), [("correlation_id", b"c"), (name, topic)])

    def _confused_types(self) -> Record:
        body = self._body()
        for _ in range(self._rng.randint(1, 3)):
            body[self._rng.choice(FIELDS)] = self._junk()
        return Record(msgpack.packb(body), self._address())

    def _damaged(self) -> Record:
        value = bytearray(msgpack.packb(self._body() | {self._rng.choice(FIELDS): self._junk()}))
        for _ in range(self._rng.randint(1, 3)):
            value[self._rng.randrange(len(value))] = self._rng.randrange(256)
        return Record(bytes(value[: self._rng.randint(1, len(value))]), self._address())

    def _nested(self) -> Record:
        depth = self._rng.choice([10, 100, 1000, 100_000])
        if self._rng.random() < 0.5:
            value = b'{"prompt": ' + b"[" * depth + b"]" * depth + b"}"
            return Record(value, [*self._address(), ("content-type", b"application/json")])
        return Record(b"\x81\xa6prompt" + b"\x91" * depth + b"\x01", self._address())

    def _lengths_that_lie(self) -> Record:
        """Containers that promise four thousand million entries."""
        start = self._rng.choice(
            [b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\xc9\xff\xff\xff\xff\x01"]
        )
        return Record(self._rng.choice([b"", b"\x81\xa6prompt"]) + start + self._bytes(50), self._address())

    def _odd_json(self) -> Record:
        values = [
            b"NaN",
            b'{"prompt": "\\ud800"}',
            b'{"prompt": "x", "prompt": 1}',
            b"1e999",
            b"9" * 5000,
            b'"' + b"\\u0000" * 99 + b'"',
        ]
        values += [
            b'{"prompt": "x", "temperature": 1e999}',
            b'{"prompt": "x", "seed": ' + b"9" * 4000 + b"}",
            b"\xef\xbb\xbf{}",
            b"{" * 500,
        ]
        values.append(json.dumps(self._body() | {"max_tokens": 1e30}).encode())
        return Record(self._rng.choice(values), [*self._address(), ("content-type", b"application/json")])

    def _giant(self) -> Record:
        size = 900_000
        values = [
            lambda: self._rng.randbytes(size),
            lambda: msgpack.packb({"prompt": "x" * size}),
            lambda: msgpack.packb({"token_ids": [1] * size}),
            lambda: msgpack.packb({"prompt": "x", "stop": ["y" * 50] * 15_000}),
            lambda: msgpack.packb({"prompt": "x", "logit_bias": {str(i): 1.0 for i in range(60_000)}}),
            lambda: msgpack.packb({f"field{i}": i for i in range(60_000)}),
            lambda: b"[" * size,
            lambda: b"\x91" * size,
        ]
        headers = self._address()
        if self._rng.random() < 0.3:
            return Record(b"x", [*headers, *((f"h{i}", b"v" * 80) for i in range(8000))])
        return Record(self._rng.choice(values)(), headers)
