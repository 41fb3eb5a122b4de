"""What a contender hands back, and the figures made of it."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Answer:
    """One request's. Times in seconds after all requests were submitted, as the caller sees them."""

    token_ids: tuple[int, ...]
    ttft: float
    latency: float


@dataclass(frozen=True, slots=True)
class Run:
    """One pass of a contender over the workload."""

    answers: tuple[Answer, ...]
    # Places for a token, over all forward passes: seats, or the batch's size, in each. None: not observed.
    num_slot_steps: int | None
    kv_use: float | None  # share of the KV memory held that a later token still reads; None: not observed

    @property
    def figures(self) -> dict[str, float]:
        """The figures of the table. Percentiles are nearest-rank."""
        num_tokens = sum(len(a.token_ids) for a in self.answers)
        wall = max(a.latency for a in self.answers)
        ttfts, latencies = [a.ttft for a in self.answers], [a.latency for a in self.answers]
        return {
            "output_tokens": num_tokens,
            "wall_s": wall,
            "output_tokens_per_s": num_tokens / wall,
            "latency_p50_s": percentile(latencies, 50),
            "latency_p99_s": percentile(latencies, 99),
            "ttft_p50_s": percentile(ttfts, 50),
            "ttft_p99_s": percentile(ttfts, 99),
            **(
                {}
                if self.num_slot_steps is None
                else {"slot_steps": self.num_slot_steps, "slot_use": num_tokens / self.num_slot_steps}
            ),
            **({} if self.kv_use is None else {"kv_use": self.kv_use}),
        }


def percentile(values: Sequence[float], percent: int) -> float:
    return sorted(values)[math.ceil(len(values) * percent / 100) - 1]


def medians(runs: Sequence[Run]) -> dict[str, float]:
    """Each figure's median over the runs."""
    figures = [run.figures for run in runs]
    return {name: statistics.median(f[name] for f in figures) for name in figures[0]}


@dataclass(frozen=True, slots=True)
class Difference:
    """Where two answers to a request part."""

    request: int
    position: int  # of the first token that differs
    token_ids: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Agreement:
    """Whether two contenders gave the same tokens."""

    left: str
    right: str
    num_compared: int  # requests
    differences: tuple[Difference, ...]
    logit_gaps: tuple[float, ...] = ()  # of each difference: how far apart the two tokens' logits are


def agreement(left: str, answers: Mapping[int, Answer], right: str, others: Mapping[int, Answer]) -> Agreement:
    """Compares the answers, by request, to the requests that both have."""
    found = []
    compared = [request for request in answers if request in others]
    for request in compared:
        ours, theirs = answers[request].token_ids, others[request].token_ids
        assert len(ours) == len(theirs), f"request {request} has answers of two lengths"
        for position, pair in enumerate(zip(ours, theirs, strict=True)):
            if pair[0] != pair[1]:
                found.append(Difference(request, position, pair))
                break
    return Agreement(left, right, len(compared), tuple(found))
