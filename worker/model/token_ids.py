"""Token ids that a model's files name, held against the ids that the model has."""

from typing import Any

import structlog
from transformers import PreTrainedModel, PreTrainedTokenizerBase

log = structlog.get_logger(__name__)

_NUM_SHOWN = 5


def eos_token_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> tuple[int, ...]:
    """What ends a sequence: the generation config's tokens, else the model's, else the tokenizer's.

    What is no id of the model is left out, with a warning: nothing checks a file's ids before they are read here.
    """
    for source in (model.generation_config, model.config, tokenizer):
        named = getattr(source, "eos_token_id", None)
        if named is None:
            continue
        named = list(named) if isinstance(named, list | tuple) else [named]
        ids = tuple(i for i in named if _is_id(i, vocab_size))
        if ignored := [i for i in named if not _is_id(i, vocab_size)]:
            log.warning(
                "model.eos_ids_ignored",
                source=type(source).__name__,
                ignored=[repr(i) for i in ignored[:_NUM_SHOWN]],
                number=len(ignored),
                reason=f"token ids are whole numbers from 0 to {vocab_size - 1}",
            )
        if ids or not named:  # an empty list says that nothing ends a sequence
            return ids
    return ()


def warn_of_unknown_ids(tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> None:
    """Says which ids the tokenizer makes that the model has no embedding for."""
    unknown = {i: token for token, i in tokenizer.get_vocab().items() if i >= vocab_size}
    if unknown:
        log.warning(
            "model.lacks_tokens",
            number=len(unknown),
            tokens=[f"{i}: {unknown[i]}" for i in sorted(unknown)[:_NUM_SHOWN]],
            reason=f"the tokenizer knows them, the model has {vocab_size} tokens: prompts with them are refused",
        )


def _is_id(value: Any, vocab_size: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < vocab_size
