"""How long a step takes, fitted while the engine runs, and how much prefill a step can bear.

    t_step = a + b * prefill_tokens + c * context_tokens + d * decodes

The fit is recursive least squares with directional forgetting (Cao and Schwartz, Automatica 36, 2000): a step makes the
model forget only what it speaks of, so hours of decodes alone do not wear out what is known of prefills. It is relative
errors that are made small: a step of 5 ms must be as right as one of 200 ms. Two more guards: an error far outside the
usual counts only as much as a large usual one (Huber), so a stalled step moves little; and no coefficient is negative,
because more work never takes less time.
"""

from collections.abc import Sequence as Items
from dataclasses import dataclass

from worker.engine.outputs import ScheduledSequence, StepPlan

# Features are scaled to about 1, which keeps the information matrix well conditioned.
_SCALES = (1.0, 1e-3, 1e-5, 1e-2)
_SIZE = len(_SCALES)
_PRIOR_INFORMATION = 1e-3  # what the start weighs, in steps
_MIN_SAMPLES = 8  # to be asked
_MIN_SAMPLES_TO_DOUBT = 32  # to know which errors are usual
_MIN_SECONDS = 1e-6
_LEAST_PREFILL = 2.0  # times what a step costs without prefill


@dataclass(frozen=True, slots=True)
class StepCost:
    """Seconds: per step, per prefill token, per token of context that decodes attend to, per decode."""

    base: float
    per_prefill_token: float
    per_context_token: float
    per_decode: float

    def seconds(self, prefill_tokens: float, context_tokens: float, num_decodes: float) -> float:
        return (
            self.base
            + self.per_prefill_token * prefill_tokens
            + self.per_context_token * context_tokens
            + self.per_decode * num_decodes
        )


class StepModel:
    """The step-time model of one worker. Times are seconds.

    `forgetting`: weight of a step against the next in its direction; 0.95 looks back about 20 of them. `huber`: an
    error beyond so many times the usual one is clipped. Raises ValueError for a forgetting factor outside (0.9, 1].
    """

    def __init__(self, *, prior: StepCost | None = None, forgetting: float = 0.95, huber: float = 3.0) -> None:
        if not 0.9 < forgetting <= 1 or huber <= 0:
            raise ValueError("forgetting must be above 0.9 and at most 1, huber above 0")
        self._forgetting = forgetting
        self._huber = huber
        self._theta = [0.0] * _SIZE
        if prior is not None:
            raw = (prior.base, prior.per_prefill_token, prior.per_context_token, prior.per_decode)
            if min(raw) < 0:
                raise ValueError("no part of a step takes negative time")
            self._theta = [value / scale for value, scale in zip(raw, _SCALES, strict=True)]
        # The inverse of the covariance: how much the steps so far have said in each direction.
        self._information = [[_PRIOR_INFORMATION * (row == column) for column in range(_SIZE)] for row in range(_SIZE)]
        self._error = 0.0  # usual size of a relative error
        self._num_samples = 0
        self._has_prior = prior is not None

    @property
    def is_fitted(self) -> bool:
        """It has a prior, or has seen enough steps to be asked."""
        return self._has_prior or self._num_samples >= _MIN_SAMPLES

    @property
    def cost(self) -> StepCost:
        """The coefficients now, none negative."""
        return StepCost(*(value * scale for value, scale in zip(self._theta, _SCALES, strict=True)))

    def observe_plan(self, plan: StepPlan, seconds: float) -> None:
        """That step took so long. One that copies says little of computing: it teaches nothing."""
        if not plan.all_copies:
            self.observe(*_work(plan.scheduled), seconds)

    def observe(self, prefill_tokens: int, context_tokens: int, num_decodes: int, seconds: float) -> None:
        """A step with so much work took so long. Asserts that none of it is negative."""
        assert min(prefill_tokens, context_tokens, num_decodes, seconds) >= 0, "negative work or time"
        work = (1, prefill_tokens, context_tokens, num_decodes)
        predicted = self.seconds(prefill_tokens, context_tokens, num_decodes)
        # A step that seems to have taken hardly any time must not outweigh all others: so the prediction counts, too.
        size = max(seconds, predicted / 2, _MIN_SECONDS)
        x = [scale * value / size for scale, value in zip(_SCALES, work, strict=True)]
        error = self._clip((seconds - predicted) / size)
        known = [_dot(row, x) for row in self._information]
        fade = (1 - self._forgetting) / _dot(x, known)
        for row, known_row, x_row in zip(self._information, known, x, strict=True):
            for column in range(_SIZE):
                row[column] += x_row * x[column] - fade * known_row * known[column]
        gain = _solve(self._information, x)
        self._theta = [t + g * error for t, g in zip(self._theta, gain, strict=True)]
        self._num_samples += 1
        self._project()

    def seconds(self, prefill_tokens: float, context_tokens: float, num_decodes: float) -> float:
        """The predicted time of a step; never negative, never less for more work."""
        return self.cost.seconds(prefill_tokens, context_tokens, num_decodes)

    def plan_seconds(self, scheduled: Items[ScheduledSequence]) -> float:
        """The predicted time of a step that computes so much, without copies; infinite until the model is fitted."""
        return self.seconds(*_work(scheduled)) if self.is_fitted else float("inf")

    def prefill_seconds(self, num_tokens: int, chunk: int) -> float:
        """The time to prefill a prompt alone, in steps of `chunk` tokens."""
        assert chunk >= 1, "a step has at least one token"
        cost = self.cost
        return -(-num_tokens // chunk) * cost.base + num_tokens * cost.per_prefill_token

    def prefill_tokens_per_s(self, chunk: int) -> float:
        """Prefill throughput in full steps of `chunk` tokens; infinite while the model knows of no cost."""
        seconds = self.seconds(chunk, 0, 0)
        return chunk / seconds if seconds > 0 else float("inf")

    def _clip(self, error: float) -> float:
        """Huber's rule. The first steps pass as they are: nothing is usual yet."""
        size = abs(error)
        if self._num_samples >= _MIN_SAMPLES_TO_DOUBT:
            # Clipped errors still widen what is usual, so a lasting change is believed within some tens of steps.
            limit = self._huber * self._error
            if size > limit:
                error = limit if error > 0 else -limit
                size = limit
        self._error = max(1e-3, self._error + 0.1 * (size - self._error))
        return error

    def _project(self) -> None:
        """Moves to the most likely coefficients that are not negative, one at a time (active set)."""
        for _ in range(_SIZE):
            worst = min(range(_SIZE), key=self._theta.__getitem__)
            if self._theta[worst] >= 0:
                return
            # Along the column of the covariance the fit loses least.
            column = _solve(self._information, [float(i == worst) for i in range(_SIZE)])
            step = self._theta[worst] / column[worst]
            self._theta = [t - step * value for t, value in zip(self._theta, column, strict=True)]
            self._theta[worst] = 0.0
        self._theta = [max(0.0, t) for t in self._theta]


class StepBudget:
    """How many prefill tokens a step may have, so that its decodes keep their TPOT target (seconds).

    `headroom`: the share of the target that the step may fill by the model; the rest is for its error and for what the
    step time does not hold (publishing, planning). Raises ValueError for a headroom outside (0, 1].
    """

    def __init__(self, model: StepModel, headroom: float = 0.9) -> None:
        if not 0 < headroom <= 1:
            raise ValueError("headroom must be above 0 and at most 1")
        self.model = model
        self.headroom = headroom

    def budget(
        self, num_decodes: int, context_tokens: int, tightest_tpot: float | None, block_size: int, max_tokens: int
    ) -> int:
        """The most prefill tokens, at most `max_tokens`, at least a block of them so that prefills always get on.

        It grows with the target, and shrinks with decodes and their context. Without decodes, a target or a fitted
        model there is nothing to keep: `max_tokens`.
        """
        if not num_decodes or tightest_tpot is None or not self.model.is_fitted:
            return max_tokens
        room = self.headroom * tightest_tpot - self.model.seconds(0, context_tokens, num_decodes)
        return self._tokens_within(room, block_size, max_tokens)

    def arrival_budget(
        self, num_decodes: int, context_tokens: int, wait: float, block_size: int, max_tokens: int
    ) -> int:
        """The most prefill tokens of a step that takes about `wait` seconds, for who comes in it waits for its end.

        At least two thirds of the step are prefill: a shorter one would cost more throughput than it saves waiting.
        """
        if not self.model.is_fitted:
            return max_tokens
        fixed = self.model.seconds(0, context_tokens, num_decodes)
        return self._tokens_within(max(wait - fixed, _LEAST_PREFILL * fixed), block_size, max_tokens)

    def _tokens_within(self, room: float, block_size: int, max_tokens: int) -> int:
        cost = self.model.cost
        if room <= 0:
            fitting = 0
        elif room >= cost.per_prefill_token * max_tokens:
            fitting = max_tokens
        else:
            fitting = int(room / cost.per_prefill_token)
        return min(max_tokens, max(block_size, fitting))


def _work(scheduled: Items[ScheduledSequence]) -> tuple[int, int, int]:
    """(prefill tokens, context tokens, decodes)."""
    num_decodes = sum([part.num_tokens == 1 for part in scheduled])
    num_context = sum([part.start for part in scheduled])
    return sum([part.num_tokens for part in scheduled]) - num_decodes, num_context, num_decodes


def _dot(left: list[float], right: list[float]) -> float:
    return sum(a * b for a, b in zip(left, right, strict=True))


def _solve(matrix: list[list[float]], right: list[float]) -> list[float]:
    """Gaussian elimination. `matrix` is positive definite, so it needs no pivoting; it is left alone."""
    rows = [[*row, value] for row, value in zip(matrix, right, strict=True)]
    size = len(rows)
    for i in range(size):
        for lower in range(i + 1, size):
            factor = rows[lower][i] / rows[i][i]
            rows[lower] = [value - factor * top for value, top in zip(rows[lower], rows[i], strict=True)]
    solution = [0.0] * size
    for i in reversed(range(size)):
        rest = sum(rows[i][k] * solution[k] for k in range(i + 1, size))
        solution[i] = (rows[i][size] - rest) / rows[i][i]
    return solution
