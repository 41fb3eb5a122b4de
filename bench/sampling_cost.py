"""What a step costs around the forward: input preparation, sampling, taking the tokens in.

    python -m bench.sampling_cost --rows 64

All rows decode, with contexts of about `--context` tokens; logits are random (a flat distribution: the worst for top_p)
and cost nothing here. CPU time of the thread that runs steps, milliseconds, the least and the median of `--steps`.
"""

import argparse
import random
from collections.abc import Callable
from statistics import median
from time import thread_time

import numpy as np
import torch

from worker.engine.outputs import NewSequence, SamplingParams, ScheduledSequence, StepPlan
from worker.model.input_batch import InputBatch
from worker.model.sampler import sample

BLOCK_SIZE = 16
WARM_UP = 3

_TOP_P = SamplingParams(temperature=0.8, top_p=0.95)
_TOP_K = SamplingParams(temperature=0.8, top_k=50)
KINDS: dict[str, Callable[[int], SamplingParams]] = {  # by row
    "greedy": lambda _: SamplingParams(temperature=0.0),
    "temperature": lambda _: SamplingParams(temperature=0.8),
    "top_p": lambda _: _TOP_P,
    "top_k": lambda _: _TOP_K,
    "min_p": lambda _: SamplingParams(temperature=0.8, min_p=0.05),
    "greedy, 5 logprobs": lambda _: SamplingParams(temperature=0.0, logprobs=5),
    "greedy, penalties": lambda _: SamplingParams(temperature=0.0, repetition_penalty=1.1, frequency_penalty=0.2),
    "greedy, min_tokens": lambda _: SamplingParams(temperature=0.0, min_tokens=10**6),
    "a mixture": lambda row: (SamplingParams(temperature=0.0), SamplingParams(temperature=0.8), _TOP_P, _TOP_K)[
        row % 4
    ],
}


def measure(
    kind: Callable[[int], SamplingParams], num_rows: int, context: int, vocab_size: int, num_steps: int
) -> list[tuple[float, float, float]]:
    """Seconds of (update and prepare, sample, append) per step."""
    rng = random.Random(0)
    batch = InputBatch(num_rows, 2 * context + WARM_UP + num_steps, BLOCK_SIZE, vocab_size)
    generator = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(num_rows, vocab_size, generator=generator)
    lens = [rng.randrange(context // 2, 2 * context) for _ in range(num_rows)]
    new = tuple(
        NewSequence(row, tuple(rng.choices(range(vocab_size), k=lens[row])), lens[row], 0, kind(row), (0,))
        for row in range(num_rows)
    )
    scheduled = [
        ScheduledSequence(i, lens[i] - 1, 1, tuple(range(-(-lens[i] // BLOCK_SIZE))), True) for i in range(num_rows)
    ]
    seconds = []
    for step in range(WARM_UP + num_steps):
        plan = StepPlan(step, (), new if step == 0 else (), tuple(scheduled))
        start = thread_time()
        batch.update(plan)
        inputs = batch.prepare(plan)
        prepared = thread_time()
        step_logits = logits.clone()
        sampling = thread_time()
        tokens = sample(step_logits, inputs.sampling)
        sampled = thread_time()
        batch.append(inputs.sampling_rows, np.array([token.token_id if token else 0 for token in tokens]))
        seconds.append((prepared - start, sampled - sampling, thread_time() - sampled))
        scheduled = [
            ScheduledSequence(i, lens[i] + step, 1, (0,) if (lens[i] + step) % BLOCK_SIZE == 0 else (), True)
            for i in range(num_rows)
        ]
    return seconds[WARM_UP:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--context", type=int, default=400, help="tokens, the mean is a little above")
    parser.add_argument("--vocab", type=int, default=49_152)
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{options.rows} rows, {options.vocab} tokens in the vocabulary, CPU ms a step: least (median)")
    print(f"{'':<20}{'prepare':>18}{'sample':>18}{'take in':>18}")
    for name, kind in KINDS.items():
        parts = zip(*measure(kind, options.rows, options.context, options.vocab, options.steps), strict=True)
        print(f"{name:<20}" + "".join(f"{1e3 * min(part):>9.3f} ({1e3 * median(part):.3f})" for part in parts))


if __name__ == "__main__":
    main()
