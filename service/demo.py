"""What the demonstration does: prompts on three lanes at once, and what came of them.

How it looks is `service.cli.demo`.
"""

import asyncio
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from schemas.records import Begin, End, Tokens
from service.client import Client
from service.errors import RequestFailed, ServiceError

TIERS = ("interactive", "standard", "batch")  # the order in which they are served
MIN_REQUESTS = 12
_UNDER_WAY_TOKENS = 4
_SILENCE_S = 300.0  # a worker that says nothing for so long has failed

_PASSAGE = (
    "Before the middle of the nineteenth century, a letter from London took ten days to reach New York, and the "
    "answer ten days more. Merchants bought and sold on prices that were three weeks old. The first cable across the "
    "Atlantic, laid in the summer of 1858, carried a greeting of ninety-eight words from the Queen to the President; "
    "it took sixteen hours to send. Three weeks later the cable fell silent, because its insulation had been made "
    "badly and an impatient engineer had put two thousand volts on it. Eight years passed before the Great Eastern, "
    "by far the largest ship of her time, laid a second one that lasted. From then on the price of cotton in "
    "Liverpool was known in New Orleans within minutes. Newspapers printed yesterday's debates of foreign "
    "parliaments, navies received their orders at anchor, and a new trade arose: people who did nothing but watch two "
    "prices in two places, and act on the difference before anybody else."
)


@dataclass(frozen=True, slots=True)
class DemoPrompt:
    tier: str
    text: str
    max_tokens: int

    @property
    def messages(self) -> list[dict[str, str]]:
        return [{"role": "user", "content": self.text}]


PROMPTS = (
    DemoPrompt("batch", f"Summarise this text in one sentence.\n\n{_PASSAGE}", 64),
    DemoPrompt("interactive", "What is the capital of France?", 24),
    DemoPrompt("standard", "Write a short poem about the sea.", 64),
    DemoPrompt("batch", f"What made the first cable fail?\n\n{_PASSAGE}", 48),
    DemoPrompt("interactive", "Name three primary colours.", 24),
    DemoPrompt("standard", "Explain why the sky is blue to a child, in a few sentences.", 64),
    DemoPrompt("batch", "Write a story about a lighthouse keeper who finds a letter in a bottle.", 128),
    DemoPrompt("interactive", "How many legs does a spider have?", 24),
    DemoPrompt("standard", "Give me a recipe for pancakes with the amounts for two people.", 80),
    DemoPrompt("batch", "Explain how a steam engine works, step by step, from the fire to the wheel.", 112),
    DemoPrompt("interactive", "Translate 'good morning' into Spanish.", 24),
    DemoPrompt("standard", "What are the advantages of riding a bicycle to work?", 64),
)


@dataclass(slots=True)
class Answer:
    """One request of the demonstration, as it grows. Times are seconds."""

    prompt: DemoPrompt
    num_prompt_tokens: int = 0
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    ttft: float | None = None  # from its own sending: not all are sent at once
    tpot: float | None = None
    end: End | None = None
    failure: ServiceError | None = None

    @property
    def num_preemptions(self) -> int:
        """How often it was displaced."""
        preemptions = self.end.preemptions if self.end is not None else None
        return 0 if preemptions is None else preemptions.recompute + preemptions.swap

    @property
    def state(self) -> str:
        if self.failure is not None:
            return "failed"
        if self.end is not None:
            return str(self.end.finish_reason)
        return "running" if self.token_ids else "waiting"

    def to_fields(self) -> dict[str, Any]:
        return {
            "tier": self.prompt.tier,
            "messages": self.prompt.messages,
            "max_tokens": self.prompt.max_tokens,
            "temperature": 0,
            "num_prompt_tokens": self.num_prompt_tokens,
            "token_ids": self.token_ids,
            "text": self.text,
            "finish_reason": self.state,
            "ttft": self.ttft,
            "tpot": self.tpot,
            "preemptions": self.num_preemptions,
        }


def demo_answers(num_requests: int) -> list[Answer]:
    """Empty answers for so many prompts; the prompts repeat when there are not enough."""
    return [Answer(PROMPTS[number % len(PROMPTS)]) for number in range(num_requests)]


async def ask(
    client: Client, answers: Sequence[Answer], on_change: Callable[[int], None], *, urgent_last: bool = False
) -> None:
    """Sends the prompts, greedy, and fills the answers in. `on_change` hears the index of what changed.

    All at once; with `urgent_last` a tier waits until one below it is being answered, and then displaces it.
    """
    answering = {tier: asyncio.Event() for tier in TIERS}

    async def one(index: int, answer: Answer) -> None:
        prompt = answer.prompt
        if urgent_last and prompt.tier != TIERS[-1]:
            await answering[TIERS[TIERS.index(prompt.tier) + 1]].wait()
        stream = client.stream(
            messages=prompt.messages,
            tier=prompt.tier,
            max_tokens=prompt.max_tokens,
            temperature=0,
            timeout=_SILENCE_S,
        )
        try:
            async with stream:
                async for event in stream:
                    _take(answer, event)
                    answer.text, answer.ttft, answer.tpot = stream.text, stream.ttft, stream.tpot
                    if len(answer.token_ids) >= _UNDER_WAY_TOKENS or answer.end is not None:
                        answering[prompt.tier].set()
                    on_change(index)
        except ServiceError as failure:
            answer.failure = failure
            answering[prompt.tier].set()
            on_change(index)

    await asyncio.gather(*(one(index, answer) for index, answer in enumerate(answers)))


def _take(answer: Answer, event: Begin | Tokens | End) -> None:
    match event:
        case Begin():
            answer.num_prompt_tokens = event.prompt_tokens
            if event.restart:
                answer.token_ids.clear()
        case Tokens():
            answer.token_ids.extend(event.token_ids)
        case End():
            answer.end = event
            if event.error is not None:
                answer.failure = RequestFailed(event.error.code, event.error.message)


@dataclass(frozen=True, slots=True)
class TierSummary:
    """Times in seconds; the times of a tier are medians, `worst_ttft` excepted."""

    tier: str
    num_requests: int
    num_tokens: int
    ttft: float | None
    worst_ttft: float | None
    tpot: float | None
    num_preemptions: int


def summarise(answers: Sequence[Answer]) -> list[TierSummary]:
    """One line per tier."""
    summaries = []
    for tier in TIERS:
        mine = [answer for answer in answers if answer.prompt.tier == tier]
        ttfts = [answer.ttft for answer in mine if answer.ttft is not None]
        tpots = [answer.tpot for answer in mine if answer.tpot is not None]
        summaries.append(
            TierSummary(
                tier,
                len(mine),
                sum(len(answer.token_ids) for answer in mine),
                statistics.median(ttfts) if ttfts else None,
                max(ttfts, default=None),
                statistics.median(tpots) if tpots else None,
                sum(answer.num_preemptions for answer in mine),
            )
        )
    return summaries


def preemption_lines(steps: Sequence[dict[str, Any]]) -> list[str]:
    """What the worker's step records tell of displaced sequences, a line for each step that displaced somebody."""
    lines = []
    for step in steps:
        modes = [preemption["mode"] for preemption in step.get("preempted", ())]
        if modes:
            how = ", ".join(f"{modes.count(mode)} by {mode}" for mode in ("swap", "recompute") if mode in modes)
            lines.append(f"{step['at'] - steps[0]['at']:6.1f} s  displaced: {how}; admitted: {len(step['admitted'])}")
    return lines


def seats_chart(steps: Sequence[dict[str, Any]], *, max_num_seqs: int, width: int) -> list[str]:
    """The worker's step records as lines of text: a column is a moment, a character is a seat and says whose it is.

    `steps` are the lines of the worker's step log, `width` the columns of the chart without its axis.
    """
    steps = [step for step in steps if step["num_running"] or step["num_waiting"]]
    if not steps:
        return []
    start, end = steps[0]["at"], steps[-1]["at"]
    moments = [start + (end - start) * (column + 0.5) / width for column in range(width)]
    columns, waiting, index = [], "", 0
    for moment in moments:
        while index + 1 < len(steps) and steps[index + 1]["at"] <= moment:
            index += 1
        seats = "".join(tier[0].upper() * steps[index]["seats_by_lane"].get(tier, 0) for tier in TIERS)
        columns.append(seats.ljust(max_num_seqs, "·"))
        num_waiting = steps[index]["num_waiting"]
        waiting += " " if not num_waiting else str(num_waiting) if num_waiting < 10 else "+"
    lines = [f"{seat:>7} │{''.join(column[seat - 1] for column in columns)}" for seat in range(max_num_seqs, 0, -1)]
    axis = f"{'0 s':<{max(width - 8, 3)}}{end - start:>6.1f} s"
    return [*lines, f"waiting │{waiting.rstrip()}", f"        └{axis}"]
