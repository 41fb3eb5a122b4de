import numpy as np
import pytest

from worker.engine.outputs import NewSequence, SamplingParams, ScheduledSequence, StepPlan
from worker.model.input_batch import InputBatch
from worker.model.sampler import streams, uniforms

SAMPLING = SamplingParams(temperature=0.5, top_p=0.9, top_k=3, min_p=0.1, seed=-1, logprobs=2)


def make_batch() -> InputBatch:
    return InputBatch(max_num_seqs=2, max_model_len=10, block_size=4, vocab_size=100)


def make_sequence(seq_id: int, token_ids: tuple[int, ...], num_prompt_tokens: int | None = None) -> NewSequence:
    return NewSequence(seq_id, token_ids, num_prompt_tokens or len(token_ids), choice=1, sampling=SAMPLING)


def make_plan(step: int, *scheduled: ScheduledSequence, new: tuple = (), removed: tuple = ()) -> StepPlan:
    return StepPlan(step, removed, new, scheduled)


def draw(batch: InputBatch, plan: StepPlan, *token_ids: int) -> None:
    """As if these had been drawn in the step, in the order of its sampling rows."""
    batch.append(batch.prepare(plan).sampling_rows, np.array(token_ids))


def test_a_mixed_step_is_flattened_by_length():
    """A decode and a chunk become one batch, decode first, each token with its position and slot."""
    batch = make_batch()
    new = (make_sequence(5, (1, 2, 3, 4, 5, 6)), make_sequence(6, (7, 8), num_prompt_tokens=1))
    plan = make_plan(0, ScheduledSequence(5, 0, 5, (9, 3), False), ScheduledSequence(6, 1, 1, (2,), True), new=new)
    batch.update(plan)
    inputs = batch.prepare(plan)
    assert inputs.token_ids.tolist() == [8, 1, 2, 3, 4, 5]
    assert inputs.positions.tolist() == [1, 0, 1, 2, 3, 4]
    assert inputs.block_ids.tolist() == [2, 9, 9, 9, 9, 3]
    assert inputs.offsets.tolist() == [1, 0, 1, 2, 3, 0]
    assert inputs.attention.query_lens.tolist() == [1, 5]
    assert inputs.attention.context_lens.tolist() == [2, 5]
    assert inputs.attention.block_tables[1].tolist() == [9, 3]
    assert inputs.sampling_seq_ids == (6,)
    assert inputs.sampling_tokens.tolist() == [0]


def test_sampling_columns_follow_their_sequence():
    """A row draws with its own parameters; the noise counts the tokens that its choice has generated."""
    batch = make_batch()
    plan = make_plan(0, ScheduledSequence(6, 0, 3, (0,), True), new=(make_sequence(6, (7, 8, 9), num_prompt_tokens=1),))
    batch.update(plan)
    sampling = batch.prepare(plan).sampling
    assert sampling.temperature.tolist() == [0.5]
    assert (sampling.top_k[0], sampling.top_p[0], sampling.num_logprobs[0]) == (3, 0.9, 2)
    assert sampling.min_p[0] == np.float32(0.1)
    seed, choice, position = np.array([[2**64 - 1], [1], [2]], np.uint64)  # seed -1, choice 1, two tokens so far
    assert sampling.uniform.tolist() == uniforms(streams(seed, choice), position).tolist()
    assert sampling.edits is None


def test_rows_grow_and_are_used_again():
    """Drawn tokens and new blocks extend a row; a removed sequence leaves its row, blocks forgotten, to the next."""
    batch = make_batch()
    first = make_plan(0, ScheduledSequence(1, 0, 4, (0,), True), new=(make_sequence(1, (1, 2, 3, 4)),))
    batch.update(first)
    draw(batch, first, 50)
    second = make_plan(1, ScheduledSequence(1, 4, 1, (7,), True))
    batch.update(second)
    inputs = batch.prepare(second)
    assert (inputs.token_ids.tolist(), inputs.block_ids.tolist()) == ([50], [7])
    new = (make_sequence(2, (9,)), make_sequence(3, (8,)))
    third = make_plan(
        2, ScheduledSequence(2, 0, 1, (4,), True), ScheduledSequence(3, 0, 1, (5,), True), new=new, removed=(1,)
    )
    batch.update(third)
    inputs = batch.prepare(third)
    assert inputs.token_ids.tolist() == [9, 8]
    assert inputs.block_ids.tolist() == [4, 5]


def test_a_plan_taken_in_twice_counts_once():
    """A step that is tried again opens no row and adds no block a second time."""
    batch = make_batch()
    plan = make_plan(0, ScheduledSequence(1, 0, 2, (3,), True), new=(make_sequence(1, (1, 2)),))
    batch.update(plan)
    batch.update(plan)
    assert batch.prepare(plan).block_ids.tolist() == [3, 3]


def test_a_row_may_be_filled_to_the_models_limit():
    """The token that fills the context is taken in; the one after it has no place and is dropped."""
    batch = make_batch()
    plan = make_plan(0, ScheduledSequence(1, 0, 9, (0, 1, 2), True), new=(make_sequence(1, tuple(range(9))),))
    batch.update(plan)
    draw(batch, plan, 9)
    batch.append(batch.prepare(make_plan(0, ScheduledSequence(1, 9, 1, (), True))).sampling_rows, np.array([10]))
    last = make_plan(1, ScheduledSequence(1, 9, 1, (), True))
    batch.update(last)
    assert batch.prepare(last).token_ids.tolist() == [9]


@pytest.mark.parametrize(
    ("scheduled", "message"),
    [
        (ScheduledSequence(1, 0, 3, (0,), True), "not known"),
        (ScheduledSequence(1, 0, 1, (0,), True), "before its last token"),
        (ScheduledSequence(1, 0, 2, (), True), "without blocks"),
    ],
)
def test_a_plan_that_does_not_fit_the_rows_is_an_error(scheduled, message):
    """Scheduler and runner count alike, or the step does not run."""
    batch = make_batch()
    plan = make_plan(0, scheduled, new=(make_sequence(1, (1, 2)),))
    batch.update(plan)
    with pytest.raises(AssertionError, match=message):
        batch.prepare(plan)


def test_more_sequences_than_rows_is_an_error():
    """The runner has as many rows as there are seats."""
    batch = make_batch()
    with pytest.raises(AssertionError, match="more sequences than rows"):
        batch.update(make_plan(0, new=tuple(make_sequence(i, (1,)) for i in range(3))))


def edits_of(batch: InputBatch, plan: StepPlan) -> tuple[list[int], list[float], list[int], list[float]]:
    """(biased ids, biases, penalised ids, what is taken off them) of a step of one sequence."""
    edits = batch.prepare(plan).sampling.edits
    if edits is None:
        return [], [], [], []
    return (
        edits.bias_ids.tolist(),
        edits.bias_values.tolist(),
        edits.penalised_ids.tolist(),
        edits.minus.tolist(),
    )


def test_edits_follow_the_tokens_and_end_with_them():
    """Counts grow with each token and the mask falls when it is due; who has nothing left to edit costs nothing."""
    batch = InputBatch(1, 200, 4, vocab_size=100)
    sampling = SamplingParams(min_tokens=2)
    masked = NewSequence(1, (5, 6), 2, 0, sampling, (9, 7, 1000))
    plan = make_plan(0, ScheduledSequence(1, 0, 2, (0,), True), new=(masked,))
    batch.update(plan)
    for _ in range(2):
        assert edits_of(batch, plan) == ([9, 7], [-np.inf] * 2, [], [])
        draw(batch, plan, 3)
        start = plan.scheduled[0].start + plan.scheduled[0].num_tokens
        plan = make_plan(plan.step + 1, ScheduledSequence(1, start, 1, (), True))
        batch.update(plan)
    assert batch.prepare(plan).sampling.edits is None
    counted = SamplingParams(repetition_penalty=2.0, frequency_penalty=0.5, presence_penalty=0.25)
    plan = make_plan(
        9, ScheduledSequence(2, 0, 4, (0,), True), new=(NewSequence(2, (5, 6, 5, 8), 3, 0, counted),), removed=(1,)
    )
    batch.update(plan)
    assert edits_of(batch, plan) == ([], [], [5, 6, 8], [0.0, 0.0, 0.75])
    for step, token_id in enumerate((6, 8, *range(10, 90)), start=10):
        draw(batch, plan, token_id)
        blocks = (step - 9,) if (step - 6) % 4 == 0 else ()
        plan = make_plan(step, ScheduledSequence(2, step - 6, 1, blocks, True))
        batch.update(plan)
    ids, minus = edits_of(batch, plan)[2:]
    assert ids == [5, 6, 8, *range(10, 90)]
    assert minus == [0.0, 0.75, 1.25, *[0.75] * 80]
    last = make_plan(500, ScheduledSequence(3, 0, 1, (0,), True), new=(make_sequence(3, (1,)),), removed=(2,))
    batch.update(last)
    assert batch.prepare(last).sampling.edits is None
