"""transformers alone: static batching as its `generate` does it, and what each request gets without a batch.

Requests are cut into batches in order of arrival. A batch is padded on the left to its longest prompt and runs to its
longest answer; then the next begins.
"""

import time
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.generation import BaseStreamer

from bench.measure import Answer, Difference, Run
from bench.workload import WARM_UP, BenchRequest, Workload
from worker.model.loader import default_cache_dir
from worker.model.smollm2 import prepare_smollm2
from worker.model.tiny import make_tiny


class _PassTimes(BaseStreamer):
    """When each forward pass of a `generate` gave its tokens, on time.perf_counter()."""

    def __init__(self, on_pass: Callable[[int], None]) -> None:
        self.times: list[float] = []
        self._on_pass = on_pass  # called with the number of the pass, from 0
        self._has_prompt = False

    def put(self, value: Tensor) -> None:
        if not self._has_prompt:  # `generate` hands the prompt over first
            self._has_prompt = True
            return
        self._on_pass(len(self.times))
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


def run(workload: Workload, on_tokens: Callable[[int], None], batch_size: int) -> Run:
    """A batch's answers are with their callers when it returns; a first token counts from its pass, as if streamed."""
    torch.set_num_threads(workload.num_threads)
    model = load_fresh(workload.model)
    generate(model, [WARM_UP])
    answers: list[Answer] = []
    num_slot_steps = kv_read = kv_held = 0
    submitted = time.perf_counter()
    for start in range(0, len(workload.requests), batch_size):
        batch = workload.requests[start : start + batch_size]
        passes = _PassTimes(lambda n, batch=batch: on_tokens(sum(n < r.max_tokens for r in batch)))
        outputs = generate(model, batch, passes)
        returned = time.perf_counter() - submitted
        ttft = passes.times[0] - submitted
        answers += [Answer(output, ttft, returned) for output in outputs]
        num_slot_steps += len(batch) * len(passes.times)
        padded = max(len(r.token_ids) for r in batch)
        for n in range(len(passes.times)):
            kv_held += len(batch) * (padded + n)
            kv_read += sum(len(r.token_ids) + n for r in batch if n < r.max_tokens)
    return Run(tuple(answers), num_slot_steps, kv_read / kv_held)


def load_fresh(name: str) -> PreTrainedModel:
    """The model as transformers makes it, with its own attention (SDPA), float32, nothing of ours in it."""
    if name == "tiny":
        model, _ = make_tiny()
        model.set_attn_implementation("sdpa")
    else:
        folder = prepare_smollm2(default_cache_dir(), lambda _what, _share: None) if name == "smollm2" else name
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
    return model.eval()


def generate(
    model: PreTrainedModel, batch: Sequence[BenchRequest], streamer: BaseStreamer | None = None
) -> list[tuple[int, ...]]:
    """Greedy answers of the library's own loop, each cut to its request's `max_tokens`."""
    width = max(len(r.token_ids) for r in batch)
    padding = [width - len(r.token_ids) for r in batch]
    ids = torch.tensor([[0] * pad + list(r.token_ids) for pad, r in zip(padding, batch, strict=True)])
    mask = torch.tensor([[0] * pad + [1] * (width - pad) for pad in padding])
    out = model.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=max(r.max_tokens for r in batch),
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        streamer=streamer,
    )
    return [tuple(row[width : width + r.max_tokens]) for row, r in zip(out.tolist(), batch, strict=True)]


def generate_unbatched(
    workload: Workload, requests: Sequence[int], on_tokens: Callable[[int], None]
) -> dict[int, Answer]:
    """The answers to some of the requests, each generated alone. Their times are not measured."""
    torch.set_num_threads(workload.num_threads)
    model = load_fresh(workload.model)
    answers = {}
    for i in requests:
        passes = _PassTimes(lambda _: on_tokens(1))
        answers[i] = Answer(*generate(model, [workload.requests[i]], passes), 0.0, 0.0)
    return answers


def logit_gaps(
    workload: Workload, answers: Mapping[int, Answer], found: Sequence[Difference], on_tokens: Callable[[int], None]
) -> tuple[float, ...]:
    """For each difference, how far apart the two tokens' logits are after what the answers have in common.

    A gap of the size of float32's rounding says that the order of a sum decided. `answers` are those of one side.
    """
    torch.set_num_threads(workload.num_threads)
    model = load_fresh(workload.model)
    gaps = []
    for difference in found:
        common = answers[difference.request].token_ids[: difference.position]
        ids = torch.tensor([[*workload.requests[difference.request].token_ids, *common]])
        with torch.inference_mode():
            logits = model(ids, logits_to_keep=1).logits[0, -1]
        left, right = logits[list(difference.token_ids)].tolist()
        gaps.append(abs(left - right))
        on_tokens(1)
    return tuple(gaps)
