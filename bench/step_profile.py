"""Where the time of a step goes: `python -m bench.step_profile --help`."""

import logging
import os
import time
from collections import Counter
from typing import Annotated, Self

import structlog
import typer
from rich import box
from rich.console import Console
from rich.table import Table
from torch.profiler import ProfilerActivity, profile

from bench import engine
from bench.workload import MIXED_64, Workload, load_trace
from schemas.command_help import Command
from worker.engine.outputs import StepOutcome, StepPlan
from worker.engine.protocols import Runner

# By the beginnings of operator names; the first group that fits counts.
_GROUPS = {
    "linear layers": ("aten::mm", "aten::addmm", "aten::linear", "aten::matmul", "aten::t", "mkldnn::", "mkl::"),
    "attention": ("aten::_scaled_dot_product", "aten::scaled_dot_product"),
    "KV gather and write": ("aten::index_select", "aten::index_fill_", "aten::_index_put", "aten::index_put"),
}
app = typer.Typer(add_completion=False)


class StepProfile:
    """A Runner around another: times the steps [first, first + num_steps), and profiles as many after them."""

    def __init__(self, first: int, num_steps: int) -> None:
        self._timed = range(first, first + num_steps)
        self._profiled = range(first + num_steps, first + 2 * num_steps)
        self._profile = profile(activities=[ProfilerActivity.CPU])
        self._runner: Runner
        self._ended_at = 0.0
        # Seconds, summed over the steps.
        self.timed = 0.0
        self.between = 0.0  # from the end of the step before to the start of each timed one
        self.profiled = 0.0
        self.num_tokens = 0  # computed in the timed steps

    def around(self, runner: Runner) -> Self:
        self._runner = runner
        return self

    def execute(self, plan: StepPlan) -> StepOutcome:
        if plan.step == self._profiled.start:
            self._profile.start()
        started_at = time.perf_counter()
        outcome = self._runner.execute(plan)
        ended_at = time.perf_counter()
        if plan.step in self._timed:
            self.timed += ended_at - started_at
            self.between += started_at - self._ended_at
            self.num_tokens += plan.num_tokens
        if plan.step in self._profiled:
            self.profiled += ended_at - started_at
        if plan.step == self._profiled.stop - 1:
            self._profile.stop()
        self._ended_at = ended_at
        return outcome

    def operators(self) -> Counter[str]:
        """Seconds inside the operators of each group, summed over the profiled steps."""
        seconds: Counter[str] = Counter()
        for operator in self._profile.key_averages():
            group = next((g for g, names in _GROUPS.items() if operator.key.startswith(names)), "other operators")
            seconds[group] += operator.self_cpu_time_total / 1e6
        return seconds


@app.command(cls=Command)
def step_profile(
    requests: Annotated[int, typer.Option(min=1, help="The first so many of mixed_64.json.")] = 32,
    model: Annotated[str, typer.Option(help="`smollm2`, `tiny`, a folder or a name on the hub.")] = "smollm2",
    seats: Annotated[int, typer.Option(min=1, help="Sequences that run at once.")] = 16,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads of torch.")] = os.cpu_count() or 1,
    first: Annotated[int, typer.Option(min=1, help="The step to start at; those before it are mostly prefill.")] = 16,
    steps: Annotated[int, typer.Option(min=1, help="How many to time, and how many more to profile.")] = 24,
) -> None:
    """Serve requests in process and tell where the time of a step goes.

    Operators are timed by torch's profiler. It makes what is not an operator look slower than it is: compare the
    profiled step with the timed one.
    """
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    workload = Workload(load_trace(MIXED_64, model, requests), model, max_num_seqs=seats, num_threads=threads)
    observed = StepProfile(first, steps)
    engine.run(workload, lambda _: None, observed.around)
    operators = observed.operators()
    table = Table("", "ms a step", "share", box=box.SIMPLE_HEAD)
    rows = [*operators.most_common(), ("Python between operators", observed.profiled - operators.total())]
    for name, seconds in rows:
        table.add_row(name, f"{seconds / steps * 1000:.2f}", f"{seconds / observed.profiled:.1%}")
    Console().print(
        table,
        f"a step: {observed.timed / steps * 1000:.1f} ms for {observed.num_tokens / steps:.1f} tokens, and "
        f"{observed.between / steps * 1000:.2f} ms to the next; profiled {observed.profiled / steps * 1000:.1f} ms",
    )


if __name__ == "__main__":
    app()
