"""What a request changes in its logits before a token is drawn: bias, mask, penalties.

All of it concerns few tokens of the vocabulary: those that the request names and those that the sequence has. So each
sequence keeps lists of them, brought up to date token by token, and a step's edits are the lists of its sequences, one
after the other. Sequences that ask for nothing have none.

The order is vLLM's (`v1/sample/sampler.py`): bias and mask, then the repetition penalty, then frequency and presence
penalties. Repetition is that of CTRL (Keskar et al. 2019, section 4.1) over prompt and output, as in transformers'
RepetitionPenaltyLogitsProcessor; frequency and presence are OpenAI's (https://platform.openai.com/docs/api-reference):
logit[t] -= frequency * count[t] + presence * (count[t] > 0), over the output only.
"""

from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from worker.engine.outputs import NewSequence

_MIN_ADDED = 64  # places, when the arrays of a sequence grow


class SequenceEdits:
    """Bias, mask and penalties of one sequence."""

    __slots__ = (
        "_bias",
        "_counts",
        "_frequency",
        "_is_counting",
        "_minus",
        "_num_masked_steps",
        "_place_of",
        "_presence",
        "_token_ids",
        "bias_ids",
        "bias_values",
        "repetition",
    )

    def __init__(self, sequence: NewSequence, vocab_size: int) -> None:
        """Counts prompt and output of a sequence that is opened; what it had before it was displaced is in them."""
        sampling = sequence.sampling
        prompt = sequence.token_ids[: sequence.num_prompt_tokens]
        output = sequence.token_ids[sequence.num_prompt_tokens :]
        self._bias = dict(sampling.logit_bias)
        self._num_masked_steps = max(0, sampling.min_tokens - len(output))
        mask = [i for i in sequence.end_token_ids if 0 <= i < vocab_size] if self._num_masked_steps else ()
        self._set_bias(self._bias | dict.fromkeys(mask, -np.inf))
        self._frequency, self._presence = sampling.frequency_penalty, sampling.presence_penalty
        self.repetition = sampling.repetition_penalty
        self._is_counting = (self._frequency, self._presence, self.repetition) != (0.0, 0.0, 1.0)
        # Where a token is in the arrays; their order is that in which the tokens came.
        counted = prompt if self.repetition != 1.0 else ()
        self._place_of = {token_id: place for place, token_id in enumerate(dict.fromkeys(counted))}
        self._counts: dict[int, int] = {}  # in the output
        self._token_ids = np.fromiter(self._place_of, np.int64, len(self._place_of))
        self._minus = np.zeros(len(self._place_of), np.float32)
        if self._is_counting:
            for token_id in output:
                self._count(token_id)

    @property
    def is_empty(self) -> bool:
        """Nothing is edited, now or later."""
        return not self._is_counting and not len(self.bias_ids)

    @property
    def penalised_ids(self) -> NDArray[np.int64]:
        """[num_penalised], each id once."""
        return self._token_ids[: len(self._place_of)]

    @property
    def minus(self) -> NDArray[np.float32]:
        """[num_penalised]: what frequency and presence take off."""
        return self._minus[: len(self._place_of)]

    def append(self, token_id: int) -> None:
        """Takes in a token that was drawn."""
        if self._num_masked_steps:
            self._num_masked_steps -= 1
            if not self._num_masked_steps:
                self._set_bias(self._bias)
        if self._is_counting:
            self._count(token_id)

    def _set_bias(self, bias: dict[int, float]) -> None:
        self.bias_ids = np.fromiter(bias.keys(), np.int64, len(bias))
        self.bias_values = np.fromiter(bias.values(), np.float32, len(bias))

    def _count(self, token_id: int) -> None:
        count = self._counts[token_id] = self._counts.get(token_id, 0) + 1
        place = self._place_of.get(token_id)
        if place is None:
            place = self._place_of[token_id] = len(self._place_of)
            if place == len(self._token_ids):
                added = max(_MIN_ADDED, place)
                self._token_ids = np.append(self._token_ids, np.zeros(added, np.int64))
                self._minus = np.append(self._minus, np.zeros(added, np.float32))
            self._token_ids[place] = token_id
        self._minus[place] = self._frequency * count + self._presence


@dataclass(frozen=True, slots=True)
class LogitEdits:
    """The edits of a step. `*_rows` and `*_ids` say which logits: the row of the step, the token id."""

    bias_rows: NDArray[np.int64]  # [num_biased]
    bias_ids: NDArray[np.int64]
    bias_values: NDArray[np.float32]  # added; -inf: masked
    penalised_rows: NDArray[np.int64]  # [num_penalised]
    penalised_ids: NDArray[np.int64]
    repetition: NDArray[np.float32]
    minus: NDArray[np.float32]

    @classmethod
    def of(cls, rows: Items[int], edits: Items[SequenceEdits]) -> Self:
        """Those of the sequences in `rows` of the step."""
        num_biased = [len(e.bias_ids) for e in edits]
        num_penalised = [len(e.penalised_ids) for e in edits]
        return cls(
            bias_rows=np.repeat(rows, num_biased),
            bias_ids=np.concatenate([e.bias_ids for e in edits]),
            bias_values=np.concatenate([e.bias_values for e in edits]),
            penalised_rows=np.repeat(rows, num_penalised),
            penalised_ids=np.concatenate([e.penalised_ids for e in edits]),
            repetition=np.repeat(np.array([e.repetition for e in edits], np.float32), num_penalised),
            minus=np.concatenate([e.minus for e in edits]),
        )

    def apply(self, logits: NDArray[np.float32]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Edits `logits` [num_rows, vocab_size], contiguous, in place. Returns what `undo` needs."""
        assert logits.flags.c_contiguous, "edits would be made to a copy"
        flat, (biased, penalised) = logits.reshape(-1), self.places(logits.shape[-1])
        # A row that is no distribution stays one, and is found out later.
        with np.errstate(invalid="ignore", over="ignore"):
            before_bias = flat[biased]
            flat[biased] = before_bias + self.bias_values
            before_penalties = flat[penalised]
            scaled = np.where(
                before_penalties > 0, before_penalties / self.repetition, before_penalties * self.repetition
            )
            flat[penalised] = scaled - self.minus
        return before_bias, before_penalties

    def undo(self, logits: NDArray[np.float32], before: tuple[NDArray[np.float32], NDArray[np.float32]]) -> None:
        """Makes edited logits, in place, what they were before `apply` returned `before`."""
        flat, (biased, penalised) = logits.reshape(-1), self.places(logits.shape[-1])
        flat[penalised] = before[1]
        flat[biased] = before[0]

    def places(self, vocab_size: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Indices of the biased and of the penalised in logits [num_rows, vocab_size], flattened."""
        return self.bias_rows * vocab_size + self.bias_ids, self.penalised_rows * vocab_size + self.penalised_ids
