"""The engine's seams. Each has a real implementation elsewhere and a deterministic one for tests."""

from typing import Protocol

from worker.engine.outputs import StepOutcome, StepPlan


class Clock(Protocol):
    """Seconds that never go back."""

    def now(self) -> float: ...


class Runner(Protocol):
    """Executes plans. Synchronous; the loop calls it from one dedicated thread."""

    def execute(self, plan: StepPlan) -> StepOutcome:
        """Runs one step. Changes the KV blocks and rows that the plan names, nothing else.

        When it raises, the loop ends the step's requests, and their rows are in the next plan's `removed`. So a runner
        forgets `removed` before anything can fail, and a row in there that it never opened is no error.
        """
        ...


class Detokenizer(Protocol):
    """Turns the tokens of one choice into text, incrementally."""

    def feed(self, token_id: int) -> str:
        """The text that became complete with this token: never half a character. Special tokens give no text."""
        ...

    def flush(self) -> str:
        """What is left at the end (an incomplete character becomes U+FFFD)."""
        ...


class PrefillBudget(Protocol):
    """Says how much prefill a step may carry so that others keep their targets."""

    def budget(
        self, num_decodes: int, context_tokens: int, tightest_tpot: float | None, block_size: int, max_tokens: int
    ) -> int:
        """Tokens of prefill, at most max_tokens. tightest_tpot: seconds; None: no target."""
        ...

    def arrival_budget(
        self, num_decodes: int, context_tokens: int, wait: float, block_size: int, max_tokens: int
    ) -> int:
        """Tokens of prefill of a step for whose end somebody more urgent may have to wait. wait: seconds."""
        ...
