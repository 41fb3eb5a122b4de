"""Edits of logits against their definition, value by value."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import RepetitionPenaltyLogitsProcessor

from tests.model.sampling import Row, edited
from tests.model.test_logit_pipeline import rows_of
from worker.engine.outputs import NewSequence, SamplingParams
from worker.model.logit_edits import LogitEdits, SequenceEdits


def edits_of(row: Row, vocab_size: int) -> SequenceEdits:
    sequence = NewSequence(0, (*row.prompt, *row.output), len(row.prompt), row.choice, row.sampling, row.end_token_ids)
    return SequenceEdits(sequence, vocab_size)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_edits_are_those_of_the_definition_and_can_be_undone(data: st.DataObject) -> None:
    """Some rows of a step, counted from the start or token by token: each logit is right, and all come back."""
    vocab_size = data.draw(st.sampled_from([5, 30]))
    rows = data.draw(st.lists(rows_of(vocab_size), min_size=1, max_size=4))
    generator = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    logits = generator.standard_normal((len(rows) + 1, vocab_size)).astype(np.float32)
    logits[0, 0] = -np.inf
    places = generator.permutation(len(rows) + 1)[: len(rows)].tolist()
    edits = []
    for row in rows:
        num_late = data.draw(st.integers(0, len(row.output)))
        early = row.output[: len(row.output) - num_late]
        edits.append(edits_of(Row(row.prompt, row.sampling, row.end_token_ids, output=early), vocab_size))
        for token_id in row.output[len(early) :]:
            edits[-1].append(token_id)
    want = logits.astype(np.float64)
    for place, row in zip(places, rows, strict=True):
        want[place] = edited(logits[place], row)
    step, changed = LogitEdits.of(places, edits), logits.copy()
    before = step.apply(changed)
    np.testing.assert_allclose(changed, want, rtol=1e-5, atol=1e-5)
    step.undo(changed, before)
    np.testing.assert_array_equal(changed, logits)


@pytest.mark.parametrize("penalty", [0.5, 1.1, 3.0])
def test_the_repetition_penalty_is_that_of_transformers(penalty: float) -> None:
    """To the last bit, over prompt and output, for logits of either sign."""
    logits = torch.linspace(-3, 3, 40)[None].contiguous()
    row = Row(list(range(0, 40, 3)), SamplingParams(repetition_penalty=penalty), output=[1, 1, 38, 0])
    want = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([[*row.prompt, *row.output]]), logits.clone())
    LogitEdits.of([0], [edits_of(row, 40)]).apply(logits.numpy())
    assert torch.equal(logits, want)


@pytest.mark.parametrize("value", [np.nan, np.inf, 3e38])
def test_what_is_no_logit_is_no_warning(value: float) -> None:
    """Edits of a row that is broken, or about to overflow, break nothing: the sampler finds it out."""
    logits = np.full((2, 4), 1.0, np.float32)
    logits[0] = value
    row = Row([0, 1], SamplingParams(repetition_penalty=1e-6, logit_bias=((2, 1e30),), min_tokens=1), (3,))
    LogitEdits.of([0], [edits_of(row, 4)]).apply(logits)
    assert (logits[1] == 1.0).all()
    assert not np.isfinite(logits[0]).all()


@pytest.mark.parametrize("end_id", [-1, -4, 4])
def test_an_end_token_that_the_model_does_not_have_edits_no_other_row(end_id: int) -> None:
    """A model's files may name any EOS id: its place would be in the row before, or the one after."""
    logits = np.ones((3, 4), np.float32)
    row = Row([0, 1], SamplingParams(min_tokens=1), (end_id, 2))
    LogitEdits.of([1], [edits_of(row, 4)]).apply(logits)
    assert (logits[[0, 2]] == 1.0).all()
    assert list(logits[1]) == [1.0, 1.0, -np.inf, 1.0]
