"""The load that every contender gets: prompts as token ids, and how many tokens each answer has."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

MIXED_64 = Path(__file__).with_name("mixed_64.json")

_TINY_VOCABULARY = 256  # `tiny` has a token per byte; traces hold token ids of a larger model


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """Greedy, to exactly `max_tokens` tokens: EOS is ignored."""

    token_ids: tuple[int, ...]
    max_tokens: int


WARM_UP = BenchRequest(tuple(range(16)), 4)  # served before the clock starts


@dataclass(frozen=True, slots=True)
class Workload:
    """What is served, and with what; the same for every contender."""

    requests: tuple[BenchRequest, ...]  # in order of arrival, all at once
    model: str
    max_num_seqs: int  # seats of ours
    num_threads: int  # of torch
    bootstrap: str | None = None  # a broker's address; None: the embedded one
    options: tuple[tuple[str, str], ...] = ()  # more settings of our worker, by name

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(r.token_ids) for r in self.requests)

    @property
    def num_output_tokens(self) -> int:
        return sum(r.max_tokens for r in self.requests)


def load_trace(path: Path, model: str, num_requests: int | None = None) -> tuple[BenchRequest, ...]:
    """The first `num_requests` of a trace file: `reqs`, a list of {prompt_ids, max_new}."""
    entries = json.loads(path.read_text())["reqs"][:num_requests]
    vocabulary = _TINY_VOCABULARY if model == "tiny" else None
    return tuple(
        BenchRequest(tuple(i % vocabulary if vocabulary else i for i in entry["prompt_ids"]), entry["max_new"])
        for entry in entries
    )


def equal_lengths(requests: Sequence[BenchRequest], length: int = 64) -> tuple[BenchRequest, ...]:
    """As many requests, of `length` prompt tokens and `length` output tokens each: the same text, cut anew."""
    token_ids = tuple(chain.from_iterable(r.token_ids for r in requests))
    token_ids *= -(-length * len(requests) // len(token_ids))
    return tuple(BenchRequest(token_ids[i * length : (i + 1) * length], length) for i in range(len(requests)))
