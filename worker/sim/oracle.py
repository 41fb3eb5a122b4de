"""What a request of the fuzzed world says when nothing disturbs it, computed without the engine."""

import codecs
from dataclasses import dataclass

from schemas.reasons import FinishReason
from worker.engine.fakes import FakeRunner
from worker.engine.request import Request

EOS = 300  # above the bytes, so ByteDetokenizer takes it for special


@dataclass(frozen=True, slots=True)
class Undisturbed:
    """One choice: all its tokens, all its text, why it ends."""

    tokens: tuple[int, ...]
    text: str
    reason: FinishReason


def undisturbed(request: Request, runner: FakeRunner) -> tuple[Undisturbed, ...]:
    """Per choice, what the runner's model answers; the end rule of protocol.md 3 is written out here once more."""
    return tuple(_choice(request, runner, choice) for choice in range(request.n))


def _choice(request: Request, runner: FakeRunner, choice: int) -> Undisturbed:
    known = list(request.prompt_token_ids)
    num_prompt = len(known)
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    text = ""
    while True:
        token_id = runner.next_token(known, num_prompt, choice)
        known.append(token_id)
        tokens = tuple(known[num_prompt:])
        is_eos = token_id in request.eos_token_ids and not request.ignore_eos
        if is_eos or token_id in request.stop_token_ids:
            return Undisturbed(tokens, text + decoder.decode(b"", final=True), FinishReason.STOP)
        text += decoder.decode(bytes((token_id,))) if token_id < 256 else ""
        stops_at = [at for at in map(text.find, request.stop) if at >= 0]
        if stops_at:
            return Undisturbed(tokens, text[: min(stops_at)], FinishReason.STOP)
        if len(tokens) == request.max_tokens:
            return Undisturbed(tokens, text + decoder.decode(b"", final=True), FinishReason.LENGTH)
