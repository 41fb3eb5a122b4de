"""Issues that other engines had with sampling (the number in a name is the row), on a real model."""

import random
from dataclasses import replace

import pytest

from schemas.reasons import FinishReason
from tests.engine.builders import make_config, make_request
from tests.model.plan_driver import PlanDriver
from tests.model.reference import random_prompts, token_ids
from worker.engine.outputs import FinishEvent, SampledToken, SamplingParams, TokenEvent
from worker.engine.request import Request
from worker.engine.scheduler import Scheduler
from worker.model.loader import LoadedModel, load_model
from worker.model.runner import TorchRunner

LIMITS = {"num_blocks": 100, "block_size": 16, "max_num_seqs": 8, "max_num_batched_tokens": 64}


@pytest.fixture(scope="module")
def tiny() -> LoadedModel:
    return load_model("tiny")


class Served:
    """A scheduler and a runner of the model, and what came out of them, by request."""

    def __init__(self, model: LoadedModel) -> None:
        self._scheduler = Scheduler(make_config(**LIMITS, max_model_len=model.max_model_len))
        self._runner = TorchRunner(model, **LIMITS)
        self.tokens: dict[str, list[SampledToken]] = {}
        self.text: dict[str, str] = {}
        self.ends: dict[str, FinishEvent] = {}

    def serve(self, *requests: Request) -> None:
        for request in requests:
            self._scheduler.add(request)
        while self._scheduler.has_work:
            plan, events = self._scheduler.schedule(0.0)
            for event in events + self._scheduler.apply(self._runner.execute(plan), 0.0):
                name = event.request_id
                if isinstance(event, TokenEvent):
                    self.tokens.setdefault(name, []).append(event.token)
                    self.text[name] = self.text.get(name, "") + event.text
                else:
                    self.ends[name] = event


def test_row_25_a_prefix_hit_does_not_change_log_probabilities(tiny: LoadedModel):
    """The second of two equal requests finds its prompt computed: tokens, logprobs and alternatives are the same.

    (Log probabilities of the prompt, which other engines served stale from the cache, are not in the contract.)
    """
    served = Served(tiny)
    (prompt,) = random_prompts([50], 256)
    asked = {"prompt": prompt, "max_tokens": 8, "sampling": SamplingParams(seed=5, logprobs=4, repetition_penalty=1.2)}
    served.serve(make_request("first", **asked))
    served.serve(make_request("second", **asked))
    assert served.ends["first"].stats.cached_tokens == 0
    assert served.ends["second"].stats.cached_tokens == 48
    assert token_ids(served.tokens["first"]) == token_ids(served.tokens["second"])
    for first, second in zip(served.tokens["first"], served.tokens["second"], strict=True):
        assert second.logprob == pytest.approx(first.logprob, abs=1e-4)
        assert [i for i, _ in second.top] == [i for i, _ in first.top]
        assert [x for _, x in second.top] == pytest.approx([x for _, x in first.top], abs=1e-4)


def test_row_26_a_seed_gives_the_same_tokens_whatever_the_order_of_the_batch(tiny: LoadedModel):
    """Sixteen seeded requests in three orders, and each alone: the noise is a function of seed and position."""
    prompts = random_prompts(range(3, 19), 256, seed=4)
    kinds = [
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=0.8, top_p=0.9, frequency_penalty=0.6),
        SamplingParams(temperature=1.3, top_k=40, repetition_penalty=1.2),
        SamplingParams(temperature=1.0, min_p=0.02, presence_penalty=1.0, logit_bias=((65, 3.0),)),
    ]
    sampling = [replace(kinds[i % 4], seed=1000 + i) for i in range(16)]

    def run(order: list[int], seats: int) -> dict[int, list[int]]:
        driver = PlanDriver.on(tiny, max_num_seqs=seats, budget=40)
        tokens = driver.generate([prompts[i] for i in order], 10, [sampling[i] for i in order])
        return {i: token_ids(own) for i, own in zip(order, tokens, strict=True)}

    order = list(range(16))
    want = run(order, seats=16)
    assert len({tuple(own) for own in want.values()}) == 16
    assert run(order[::-1], seats=5) == want
    random.Random(0).shuffle(order)
    assert run(order, seats=3) == want
    assert run([7], seats=1) == {7: want[7]}


def test_row_27_the_text_of_nonsense_is_the_text_of_its_tokens(tiny: LoadedModel):
    """A hot model draws any bytes: what was shown, piece by piece, is the decoding of all tokens at once."""
    served = Served(tiny)
    requests = [
        make_request(
            str(i),
            prompt=prompt,
            max_tokens=60,
            sampling=SamplingParams(temperature=5.0, seed=i),
            new_detokenizer=tiny.tokenizer.new_detokenizer,
        )
        for i, prompt in enumerate(random_prompts([5] * 8, 256))
    ]
    served.serve(*requests)
    for name, tokens in served.tokens.items():
        assert served.text[name] + served.ends[name].tail == tiny.tokenizer.decode(token_ids(tokens))
    assert "\ufffd" in "".join(served.text.values())


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_row_30_the_model_cannot_end_before_min_tokens(tiny: LoadedModel, temperature: float):
    """Every end token is forced by bias, so that it comes at once, in every run: but not before min_tokens."""
    ends = (*tiny.eos_token_ids, 256, 65)
    for min_tokens in (0, 1, 5):
        served = Served(tiny)
        sampling = SamplingParams(
            temperature=temperature, min_tokens=min_tokens, logit_bias=tuple((i, 1e30) for i in dict.fromkeys(ends))
        )
        served.serve(
            make_request(
                prompt=5,
                max_tokens=9,
                sampling=sampling,
                eos_token_ids=(*tiny.eos_token_ids, 256),
                stop_token_ids=(65,),
            )
        )
        assert [token in ends for token in token_ids(served.tokens["r"])] == [False] * min_tokens + [True]
        assert served.ends["r"].reason is FinishReason.STOP


def test_row_34_an_eos_beyond_the_vocabulary_masks_nothing_and_harms_nobody(tiny: LoadedModel):
    """A model's configuration may name one that its output head does not have; ids of callers are checked before."""
    served = Served(tiny)
    sampling = SamplingParams(temperature=0.0, min_tokens=4)
    asked = {"prompt": 5, "max_tokens": 6, "sampling": sampling}
    served.serve(make_request("odd", eos_token_ids=(10**6,), **asked), make_request("good", **asked))
    assert token_ids(served.tokens["odd"]) == token_ids(served.tokens["good"])
    assert served.ends["odd"].reason is FinishReason.LENGTH
