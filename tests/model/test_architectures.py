"""Every family of causal language models: served as transformers computes it, or refused at load with the reason."""

import random
from collections import Counter
from collections.abc import Iterator

import pytest
import torch
from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.engine.builders import make_config, make_request
from tests.model.plan_driver import GREEDY, PlanDriver
from tests.model.reference import generate_greedy, random_prompts, token_ids
from tests.model.small_models import next_logits, own_attention, random_model
from worker.engine.outputs import FinishEvent, SampledToken, SamplingParams, StepRecord, TokenEvent
from worker.engine.scheduler import Scheduler
from worker.model.attention import PagedContext
from worker.model.errors import ModelError
from worker.model.families import FAMILIES, Family, small_config
from worker.model.loader import LoadedModel, adopt
from worker.model.runner import TorchRunner
from worker.model.tiny import make_tiny
from worker.model.trial import look_at, try_out

SERVED = {family.model_type: family for family in FAMILIES if family.refused is None}
REFUSED = {family.model_type: family for family in FAMILIES if family.refused is not None and family.tested}

GREEDY_WITH_LOGPROBS = SamplingParams(temperature=0.0, logprobs=0)
NUM_TOKENS = 10
# Five prompts with a common beginning of five blocks, longer than all windows and chunks, and two of their own.
PREFIX_LEN = 40
SUFFIX_LENS = (3, 25, 50, 9, 17)
OTHER_LENS = (1, 70)


def make_prompts(vocab_size: int = 211) -> list[list[int]]:
    rng = random.Random(5)
    draw = lambda length: [rng.randrange(3, vocab_size) for _ in range(length)]  # noqa: E731
    prefix = draw(PREFIX_LEN)
    return [*(prefix + draw(length) for length in SUFFIX_LENS), *(draw(length) for length in OTHER_LENS)]


@pytest.fixture(scope="module")
def tokenizer():
    return make_tiny()[1]


@pytest.fixture
def attention_calls(monkeypatch) -> Iterator[Counter]:
    """How many forwards there were, and how many layers were computed by our attention."""
    calls, attend, init = Counter(), PagedContext.attend, PagedContext.__init__

    def counting_init(self, *args):
        calls["forwards"] += 1
        init(self, *args)

    def counting_attend(self, *args, **kwargs):
        calls["layers"] += 1
        return attend(self, *args, **kwargs)

    monkeypatch.setattr(PagedContext, "__init__", counting_init)
    monkeypatch.setattr(PagedContext, "attend", counting_attend)
    return calls


def serve(model: LoadedModel, prompts: list[list[int]]) -> tuple[list[list[SampledToken]], list[StepRecord], int]:
    """Greedy tokens of all prompts out of an engine with too little of everything, its steps, and how many tokens of the
    prompts it found computed.

    Prompts come in chunks; most begin with blocks that another one computed. The last two are urgent, and displace two
    that run: the host pool holds one of these, so the other is computed again.
    """
    limits = {"num_blocks": 31, "block_size": 8, "max_num_seqs": 4, "max_num_batched_tokens": 24}
    config = make_config(**limits, num_host_blocks=12, preemption="swap", max_model_len=model.max_model_len)
    scheduler = Scheduler(config)
    runner = TorchRunner(model, **limits, num_host_blocks=12)
    runner.cache.blocks.fill_(torch.nan)
    requests = [
        make_request(
            str(i),
            prompt=prompt,
            sampling=GREEDY_WITH_LOGPROBS,
            max_tokens=NUM_TOKENS,
            ignore_eos=True,
            priority=1 if i < len(prompts) - 2 else 7,
            priority_class=0 if i < len(prompts) - 2 else 2,
            new_detokenizer=model.tokenizer.new_detokenizer,
        )
        for i, prompt in enumerate(prompts)
    ]
    for request in requests[:-2]:
        scheduler.add(request)
    tokens, records, num_cached = [[] for _ in prompts], [], 0
    while scheduler.has_work:
        if len(records) == 8:
            for request in requests[-2:]:
                scheduler.add(request)
        plan, events = scheduler.schedule(float(len(records)))
        events += scheduler.apply(runner.execute(plan), float(len(records)))
        records.append(scheduler.last_record)
        scheduler.check_integrity()
        for event in events:
            if isinstance(event, TokenEvent):
                tokens[int(event.request_id)].append(event.token)
            elif isinstance(event, FinishEvent):
                num_cached += event.stats.cached_tokens
    return tokens, records, num_cached


@pytest.mark.parametrize("name", SERVED)
def test_served_as_transformers_computes_it(name, tokenizer, attention_calls):
    """Chunked, from cached blocks, after a swap and after a recomputation: tokens and their logprobs are transformers'."""
    model = random_model(small_config(SERVED[name]))
    reference = own_attention(model)
    loaded = adopt(name, model, tokenizer)
    assert len(loaded.layers) >= model.config.get_text_config().num_hidden_layers
    prompts = make_prompts()
    attention_calls.clear()
    served, records, num_cached = serve(loaded, prompts)
    assert attention_calls["forwards"] > 20
    assert attention_calls["layers"] == attention_calls["forwards"] * len(loaded.layers)
    assert {p.mode for record in records for p in record.preempted} == {"swap", "recompute"}
    assert num_cached >= PREFIX_LEN
    for prompt, sampled in zip(prompts, served, strict=True):
        tokens = token_ids(sampled)
        want = next_logits(reference, prompt, tokens)
        assert tokens == want.argmax(-1).tolist()
        logprobs = want.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor([t.logprob for t in sampled]), logprobs, atol=1e-3, rtol=1e-3)
    assert len({token.token_id for sampled in served for token in sampled}) > 4, "a model that repeats itself"


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_the_reason(name):
    """What we would answer wrongly for is refused before its weights are read, or when the loaded model is tried."""
    family = REFUSED[name]
    config = small_config(family)
    with pytest.raises(ModelError, match=family.refused) as caught:
        look_at(config)
        try_out(random_model(config))
    assert "cannot be served: " in str(caught.value)


def test_every_family_of_transformers_is_in_the_list():
    """A family that a new transformers brings needs a row, and a test with it."""
    assert sorted(family.model_type for family in FAMILIES) == sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
