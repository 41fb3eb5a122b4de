"""`python -m tests.e2e.deadly_worker` is `carousel worker`, but a step with a request of DEADLY_SEED kills the process,
as a fault in native code does, or the kernel when memory is out. Its supervisor starts the same again."""

import os
import signal
import sys

import worker.cli
import worker.supervisor
from worker.engine.outputs import StepOutcome, StepPlan

DEADLY_SEED = 666


def _make_deadly() -> None:
    from worker.model.runner import TorchRunner

    execute, deadly = TorchRunner.execute, set()

    def execute_or_die(self: TorchRunner, plan: StepPlan) -> StepOutcome:
        deadly.update(new.seq_id for new in plan.new if new.sampling.seed == DEADLY_SEED)
        if any(part.seq_id in deadly for part in plan.scheduled):
            os.kill(os.getpid(), signal.SIGKILL)
        return execute(self, plan)

    TorchRunner.execute = execute_or_die


def _supervise_the_same() -> None:
    become_supervisor = worker.supervisor.become_supervisor

    def become(settings: worker.supervisor.Settings, words: list[str]) -> None:
        become_supervisor(settings, [__spec__.name if word == "worker" else word for word in words])

    worker.supervisor.become_supervisor = become


if __name__ == "__main__":
    _supervise_the_same()
    if "--supervisor" not in sys.argv:
        _make_deadly()
    worker.cli.main()
