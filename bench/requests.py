"""Requests for an engine without Kafka around it."""

from collections.abc import Callable, Sequence

from worker.engine.outputs import SamplingParams
from worker.engine.protocols import Detokenizer
from worker.engine.request import Request


def greedy_request(
    request_id: str,
    token_ids: Sequence[int],
    max_tokens: int,
    *,
    new_detokenizer: Callable[[], Detokenizer],
    lane: str = "standard",
    priority_class: int = 0,
    arrival: float = 0.0,
) -> Request:
    """To exactly `max_tokens` tokens: the likeliest ones, EOS ignored. arrival: seconds, on the engine's clock."""
    return Request(
        request_id=request_id,
        prompt_token_ids=tuple(token_ids),
        sampling=SamplingParams(temperature=0.0),
        max_tokens=max_tokens,
        eos_token_ids=(),
        stop_token_ids=(),
        stop=(),
        ignore_eos=True,
        n=1,
        lane=lane,
        tenant="default",
        priority=4,
        priority_class=priority_class,
        arrival=arrival,
        deadline=None,
        new_detokenizer=new_detokenizer,
    )
