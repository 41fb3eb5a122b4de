from dataclasses import replace

import pytest
import torch

from tests.model.plan_driver import GREEDY, PlanDriver
from tests.model.reference import random_prompts, token_ids
from tests.model.small_models import random_model
from worker.engine.outputs import BlockCopy, NewSequence, SamplingParams, ScheduledSequence, StepPlan
from worker.model.families import FAMILIES, small_config
from worker.model.loader import LoadedModel, adopt, load_model
from worker.model.runner import TorchRunner
from worker.model.tiny import make_tiny

SEEDED = [
    SamplingParams(temperature=1.0, seed=1),
    SamplingParams(temperature=0.8, top_p=0.9, seed=2),
    SamplingParams(temperature=1.5, top_k=20, seed=3),
    SamplingParams(temperature=1.0, min_p=0.05, seed=4, logprobs=3),
    GREEDY,
    SamplingParams(temperature=0.0, repetition_penalty=1.4, frequency_penalty=0.5),
    SamplingParams(temperature=0.9, seed=5, presence_penalty=1.1, logit_bias=((65, 4.0), (66, -1e30))),
]


@pytest.fixture(scope="module")
def tiny() -> LoadedModel:
    return load_model("tiny")


def run_alone(model: LoadedModel, prompt: list[int], max_tokens: int, sampling: SamplingParams) -> list[int]:
    driver = PlanDriver.on(model, max_num_seqs=1, budget=1000)
    return token_ids(driver.generate([prompt], max_tokens, [sampling])[0])


def first_step(seq_id: int, prompt: list[int], block_id: int) -> StepPlan:
    new = NewSequence(seq_id, tuple(prompt), len(prompt), 0, SEEDED[0])
    return StepPlan(0, (), (new,), (ScheduledSequence(seq_id, 0, len(prompt), (block_id,), True),))


def test_seeded_tokens_do_not_depend_on_company(tiny):
    """With a seed, a sequence gets the same tokens alone in one piece and among others in chunks."""
    prompts = random_prompts([3, 40, 77, 16, 25, 30, 8], 256)
    together = PlanDriver.on(tiny, max_num_seqs=7, budget=30).generate(prompts, 12, SEEDED)
    for prompt, sampling, tokens in zip(prompts, SEEDED, together, strict=True):
        assert token_ids(tokens) == run_alone(tiny, prompt, 12, sampling)


def test_choices_and_seeds_differ(tiny):
    """Another seed gives other tokens, and so does another choice of the same request."""
    (prompt,) = random_prompts([10], 256)
    runner = TorchRunner(tiny, 40, 16, 30, 512)
    hot = [SamplingParams(temperature=3.0, seed=seed) for seed in (1, 1, 2)]
    new = tuple(
        NewSequence(i, tuple(prompt), 10, choice, sampling)
        for i, (choice, sampling) in enumerate(zip((0, 1, 0), hot, strict=True))
    )
    tokens: dict[int, list[int]] = {0: [], 1: [], 2: []}
    for step in range(8):
        start, count = (0, 10) if step == 0 else (9 + step, 1)
        blocks = [(2 * i, 2 * i + 1) if step == 0 else () for i in range(3)]
        scheduled = [ScheduledSequence(i, start, count, blocks[i], True) for i in range(3)]
        outcome = runner.execute(StepPlan(step, (), new if step == 0 else (), tuple(scheduled)))
        for i, token in outcome.tokens.items():
            tokens[i].append(token.token_id)
    assert len({tuple(t) for t in tokens.values()}) == 3


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED[0], *SEEDED[5:]], ids=["greedy", "seeded", "penalties", "bias"])
def test_a_sequence_that_comes_back_goes_on_as_before(tiny, sampling):
    """Removed after some tokens and opened again with them, as after preemption, it draws what it would have drawn."""
    (prompt,) = random_prompts([21], 256)
    want = run_alone(tiny, prompt, 10, sampling)
    runner = TorchRunner(tiny, 10, 16, 1, 512)
    got: list[int] = []
    for step in range(10):
        known = (*prompt, *got)
        new = NewSequence(step, known, len(prompt), 0, sampling)
        scheduled = ScheduledSequence(step, 0, len(known), (step % 3, 5 + step % 2), True)
        removed = (step - 1,) if step else ()
        outcome = runner.execute(StepPlan(step, removed, (new,), (scheduled,)))
        got.append(outcome.tokens[step].token_id)
    assert got == want


def test_logits_that_are_not_finite_fail_one_sequence_only():
    """The others get their tokens, and the blocks of the failed one do no harm to who gets them next."""
    model = load_model("tiny")
    with torch.no_grad():
        model.model.get_input_embeddings().weight[200] = torch.nan
    prompts = [[1, 2, 3], [4, 200, 6], [7, 8, 9, 10]]
    runner = TorchRunner(model, 3, 16, 3, 512)
    new = tuple(NewSequence(i, tuple(prompt), len(prompt), 0, GREEDY) for i, prompt in enumerate(prompts))
    scheduled = tuple(ScheduledSequence(i, 0, len(prompt), (i,), True) for i, prompt in enumerate(prompts))
    outcome = runner.execute(StepPlan(0, (), new, scheduled))
    assert outcome.failed == {1: "the model's logits for this sequence are not finite, or rule every token out"}
    good = {i: token.token_id for i, token in outcome.tokens.items()}
    assert good == {i: run_alone(model, prompts[i], 1, GREEDY)[0] for i in (0, 2)}
    plan = StepPlan(
        1,
        (1,),
        (NewSequence(3, (11, 12), 2, 0, GREEDY),),
        (ScheduledSequence(3, 0, 2, (1,), True), ScheduledSequence(0, 3, 1, (), True)),
    )
    tokens = runner.execute(plan).tokens
    assert tokens[3].token_id == run_alone(model, [11, 12], 1, GREEDY)[0]
    assert tokens[0].token_id == run_alone(model, prompts[0], 2, GREEDY)[1]


def test_a_mask_over_everything_fails_one_sequence_only(tiny):
    """Where no token is left to draw, its request is told; the one beside it goes on. (The edge lets none through.)"""
    runner = TorchRunner(tiny, 2, 16, 2, 512)
    new = (
        NewSequence(0, (1, 2), 2, 0, SamplingParams(min_tokens=1), tuple(range(tiny.vocab_size))),
        NewSequence(1, (1, 2), 2, 0, GREEDY),
    )
    scheduled = tuple(ScheduledSequence(i, 0, 2, (i,), True) for i in range(2))
    outcome = runner.execute(StepPlan(0, (), new, scheduled))
    assert "rule every token out" in outcome.failed[0]
    assert outcome.tokens[1].token_id == run_alone(tiny, [1, 2], 1, GREEDY)[0]
    # It is forgotten like any other; the survivor's next step is not disturbed.
    outcome = runner.execute(StepPlan(1, (0,), (), (ScheduledSequence(1, 2, 1, (), True),)))
    assert outcome.tokens[1].token_id == run_alone(tiny, [1, 2], 2, GREEDY)[1]


def test_only_rows_that_draw_go_through_the_output_head(tiny):
    """A step of a decode, a last chunk and a chunk that is not the last: two rows, and no others."""
    seen = []
    hook = tiny.model.get_output_embeddings().register_forward_hook(lambda *call: seen.append(call[2].shape[-2]))
    runner = TorchRunner(tiny, 9, 16, 3, 512)
    first = StepPlan(0, (), (NewSequence(0, (1, 2), 2, 0, GREEDY),), (ScheduledSequence(0, 0, 2, (0,), True),))
    new = (NewSequence(1, tuple(range(30)), 30, 0, GREEDY), NewSequence(2, tuple(range(50)), 50, 0, GREEDY))
    mixed = (
        ScheduledSequence(0, 2, 1, (), True),
        ScheduledSequence(1, 0, 30, (1, 2), True),
        ScheduledSequence(2, 0, 20, (3, 4), False),
    )
    try:
        runner.execute(first)
        runner.execute(StepPlan(1, (), new, mixed))
        runner.execute(StepPlan(2, (), (), (ScheduledSequence(2, 20, 10, (), False),)))
    finally:
        hook.remove()
    assert seen == [1, 2, 0]


def test_a_step_that_failed_can_be_tried_again(tiny, monkeypatch):
    """After an error in the forward the same plan gives what it would have given. It does not copy again: what a copy
    read may have been overwritten by the try that failed."""
    (prompt,) = random_prompts([5], 256)
    runner = TorchRunner(tiny, 4, 16, 1, 512, num_host_blocks=3)
    plan = replace(first_step(1, prompt, 2), copies=(BlockCopy(0, 1),), swap_ins=(BlockCopy(2, 0),))
    runner.cache.blocks.fill_(1.0)
    runner._host_cache.blocks.fill_(2.0)
    with monkeypatch.context() as patch:
        patch.setattr("worker.model.runner.sample", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            runner.execute(plan)
    assert runner.execute(plan).tokens[1].token_id == run_alone(tiny, prompt, 1, SEEDED[0])[0]
    assert [runner.cache.blocks[i, 0].item() for i in (0, 1)] == [2.0, 1.0]


def test_steps_without_samples_or_tokens(tiny):
    """A step of chunks that are not the last ones draws nothing, and a step that only removes computes nothing."""
    runner = TorchRunner(tiny, 4, 16, 1, 512)
    new = NewSequence(1, (1, 2, 3, 4), 4, 0, GREEDY)
    assert runner.execute(StepPlan(0, (), (new,), (ScheduledSequence(1, 0, 2, (0,), False),))).tokens == {}
    assert runner.execute(StepPlan(1, (1,), (), ())).tokens == {}


def test_only_the_named_blocks_change(tiny):
    """A step writes the slots of its tokens and leaves every other byte of the KV cache alone."""
    runner = TorchRunner(tiny, 6, 16, 1, 512)
    runner.cache.blocks.fill_(7.0)
    runner.execute(first_step(1, [1, 2, 3], 4))
    assert (runner.cache.blocks[[0, 1, 2, 3, 5]] == 7.0).all()
    for layer in runner.cache.layers:
        for numbers in layer:
            assert (numbers[4, 3:] == 7.0).all()
            assert (numbers[4, :3] != 7.0).all()


def test_a_plan_above_the_budget_is_an_error(tiny):
    """The scheduler keeps the token budget; the runner holds it to that."""
    runner = TorchRunner(tiny, 6, 16, 1, 4)
    with pytest.raises(AssertionError, match="token budget"):
        runner.execute(first_step(1, [1] * 5, 0))


def test_half_precision_runs():
    """The same model in bfloat16 generates, with a KV cache half the size."""
    model = load_model("tiny", dtype="bfloat16")
    assert model.bytes_per_token == load_model("tiny").bytes_per_token // 2
    tokens = PlanDriver.on(model, max_num_seqs=4, budget=30).generate(random_prompts([5, 20, 33], 256), 4)
    assert all(0 <= token.token_id < model.vocab_size for sequence in tokens for token in sequence)


@pytest.mark.parametrize("kv_dtype", ["int8", "fp8"])
def test_a_quantised_kv_cache_is_small(kv_dtype):
    """A byte for a number, and a scale for each token and head."""
    model = load_model("tiny", kv_dtype=kv_dtype)
    heads, head_dim, layers = 2, 16, 2
    assert model.bytes_per_token == layers * 2 * heads * (head_dim + 4)
    assert TorchRunner(model, 10, 16, 1, 512).cache.blocks.nbytes == 10 * 16 * model.bytes_per_token


@pytest.mark.parametrize(("kv_dtype", "tolerance"), [(torch.int8, 0.03), (torch.float8_e4m3fn, 0.4)], ids=str)
def test_a_quantised_kv_cache_is_close(kv_dtype, tolerance):
    """Contexts that came in chunks: the next token's log-probability is that of an exact cache, nearly."""
    (family,) = (f for f in FAMILIES if f.model_type == "llama")
    exact = adopt("llama", random_model(small_config(family)), make_tiny()[1])
    prompts = random_prompts([5, 20, 33, 70], 211)
    sampling = [SamplingParams(temperature=0.0, logprobs=0)] * len(prompts)
    got, want = (
        PlanDriver.on(model, max_num_seqs=4, budget=30).generate(prompts, 1, sampling)
        for model in (replace(exact, kv_dtype=kv_dtype), exact)
    )
    differences = [abs(mine.logprob - theirs.logprob) for (mine,), (theirs,) in zip(got, want, strict=True)]
    assert min(differences) > 0
    assert sum(differences) / len(differences) < tolerance


@pytest.mark.parametrize("kv_dtype", ["int8", "fp8"])
def test_quantised_blocks_move_with_their_scales(kv_dtype):
    """A sequence that was swapped out and in goes on as if it had never left."""
    model = load_model("tiny", kv_dtype=kv_dtype)
    new, prompt = NewSequence(0, tuple(range(20)), 20, 0, GREEDY), ScheduledSequence(0, 0, 20, (0, 1), True)
    stays = TorchRunner(model, 4, 16, 1, 512, num_host_blocks=2)
    moves = TorchRunner(model, 4, 16, 1, 512, num_host_blocks=2)
    want, got = (runner.execute(StepPlan(0, (), (new,), (prompt,))).tokens[0].token_id for runner in (stays, moves))
    moves.execute(StepPlan(1, (0,), (), (), swap_outs=(BlockCopy(0, 1), BlockCopy(1, 0))))
    moves.cache.blocks.fill_(255)
    back = NewSequence(1, (*range(20), got), 20, 0, GREEDY)
    copies = (BlockCopy(1, 3), BlockCopy(0, 2))
    decode = ScheduledSequence(1, 20, 1, (3, 2), True)
    again = moves.execute(StepPlan(2, (), (back,), (decode,), swap_ins=copies))
    stayed = stays.execute(StepPlan(1, (), (), (ScheduledSequence(0, 20, 1, (), True),)))
    assert (got, again.tokens[1].token_id) == (want, stayed.tokens[0].token_id)
