"""What a step costs in the scheduler: `schedule` + `apply`, in pure Python, over the number of the waiting.

    python -m bench.scheduler_cost --waiting 10 1000 10000 100000

256 sequences decode, requests end and others take their seats (`--output` tokens each), 8192 blocks of 16. The runner
answers at once; its time does not count. `--clock cpu` is the time that this process had a core: on a busy machine it
is nearer to what an idle one shows.
"""

import argparse
import gc
from collections.abc import Callable
from statistics import median, quantiles
from time import perf_counter, process_time

from worker.engine.outputs import SampledToken, SamplingParams, StepOutcome
from worker.engine.policies import DEFAULT_POLICY, POLICIES, make_policy
from worker.engine.request import Request
from worker.engine.scheduler import Scheduler, SchedulerConfig

_TOKEN = SampledToken(7)


class _NoText:
    """A detokenizer whose cost is nothing: it is not the scheduler's."""

    def feed(self, token_id: int) -> str:
        return ""

    def flush(self) -> str:
        return ""


def make_request(number: int, prompt: int, output: int) -> Request:
    """A request with a prompt of its own, so that the prefix cache costs and gives nothing back."""
    return Request(
        request_id=f"r{number}",
        prompt_token_ids=(number, *range(prompt - 1)),
        sampling=SamplingParams(),
        max_tokens=output,
        eos_token_ids=(1,),
        stop_token_ids=(),
        stop=(),
        ignore_eos=False,
        n=1,
        lane=("interactive", "standard", "batch")[number % 3],
        tenant="default",
        priority=number % 10,
        arrival=float(number),
        deadline=None,
        new_detokenizer=_NoText,
    )


def measure(
    num_waiting: int,
    num_running: int,
    num_steps: int,
    prompt: int,
    output: int,
    policy: str = "fcfs",
    clock: Callable[[], float] = perf_counter,
) -> list[float]:
    """Seconds of schedule + apply for num_steps steps; the waiting are topped up to num_waiting between them."""
    scheduler = Scheduler(
        SchedulerConfig(
            num_blocks=8192,
            max_num_seqs=num_running,
            max_num_batched_tokens=8192,
            max_model_len=prompt + output,
        ),
        make_policy(policy),
    )
    number = 0
    seconds: list[float] = []
    warm_up = -(-num_running * prompt // 8192) + 5
    gc.collect()
    gc.disable()  # the worker freezes its long-lived objects, too
    for step in range(warm_up + num_steps):
        missing = num_waiting + (num_running if step == 0 else 0) - scheduler.stats().num_waiting
        for number in range(number, number + missing):  # noqa: B020
            # Of different lengths, so that seats come free one by one.
            scheduler.add(make_request(number, prompt, output - number % (output // 2)))
        number += 1
        start = clock()
        plan, _ = scheduler.schedule(float(step))
        planned = clock()
        assert plan is not None
        outcome = StepOutcome(plan.step, {part.seq_id: _TOKEN for part in plan.scheduled if part.samples})
        applying = clock()
        scheduler.apply(outcome, float(step))
        if step >= warm_up:
            seconds.append(clock() - applying + planned - start)
    gc.enable()
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--waiting", type=int, nargs="+", default=[10, 100, 1000, 10_000, 100_000])
    parser.add_argument("--running", type=int, default=256)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--prompt", type=int, default=200, help="tokens")
    parser.add_argument("--output", type=int, default=200, help="tokens, at most")
    parser.add_argument("--policy", choices=POLICIES, default=DEFAULT_POLICY)
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    arguments = parser.parse_args()
    clock = process_time if arguments.clock == "cpu" else perf_counter
    limits = f"{arguments.running} running, 8192 blocks, {arguments.steps} steps, {arguments.policy}"
    print(f"schedule + apply, {limits}; milliseconds ({arguments.clock} clock)")
    print(f"{'waiting':>8} {'p10':>8} {'median':>8} {'p90':>8}")
    for num_waiting in arguments.waiting:
        seconds = measure(
            num_waiting,
            arguments.running,
            arguments.steps,
            arguments.prompt,
            arguments.output,
            arguments.policy,
            clock,
        )
        p10, *_, p90 = quantiles(seconds, n=10)
        print(f"{num_waiting:>8} {p10 * 1e3:>8.3f} {median(seconds) * 1e3:>8.3f} {p90 * 1e3:>8.3f}")


if __name__ == "__main__":
    main()
