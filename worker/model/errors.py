"""What the model side raises. Texts say what to do."""

from worker.engine.outputs import StepOutcome


class ModelError(Exception):
    """A model cannot be had, or cannot be served."""


class RunnerError(Exception):
    """A step went wrong for some of its sequences, `seq_ids`. `outcome` has the tokens of the others."""

    def __init__(self, message: str, seq_ids: tuple[int, ...], outcome: StepOutcome):
        super().__init__(message)
        self.seq_ids = seq_ids
        self.outcome = outcome
