"""Random models of all families, small enough for a test; how we serve them, and what transformers makes of them."""

import random
from collections.abc import Sequence
from copy import deepcopy

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from tests.engine.builders import make_config, make_request
from worker.engine.outputs import FinishEvent, SampledToken, SamplingParams, StepRecord, TokenEvent
from worker.engine.scheduler import Scheduler
from worker.model.loader import LoadedModel
from worker.model.runner import TorchRunner

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


def random_model(config: PreTrainedConfig, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A model with random weights, biases and norms too: what is zero or one hides what reads it."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval().requires_grad_(False)
        for weight in model.parameters():
            if weight.numel() and (weight == weight.flatten()[0]).all():
                weight.add_(torch.randn_like(weight), alpha=0.1)
    return model.to(dtype)


def own_attention(model: PreTrainedModel) -> PreTrainedModel:
    """A copy that computes attention as transformers does."""
    copy = deepcopy(model)
    copy.set_attn_implementation("eager")
    return copy


def next_logits(reference: PreTrainedModel, prompt: Sequence[int], tokens: Sequence[int]) -> torch.Tensor:
    """float32 [len(tokens), vocab_size]: the logits each of `tokens` was to be drawn from, in one plain forward."""
    with torch.inference_mode():
        logits = reference(input_ids=torch.tensor([[*prompt, *tokens[:-1]]]), use_cache=False).logits[0]
    return logits[len(prompt) - 1 :].float()


def serve(model: LoadedModel, prompts: list[list[int]]) -> tuple[list[list[SampledToken]], list[StepRecord], int]:
    """Greedy tokens of all prompts, the steps, and how many tokens were found computed. There is too little of all.

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
