"""All contenders on the same load, in turns, and whether they say the same."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from bench.contenders import Contender, generate_unbatched, logit_gaps, serve
from bench.measure import Agreement, Answer, Run, agreement, medians
from bench.workload import Workload

UNBATCHED = "transformers, unbatched"

# Calls a function that reports tokens to its argument, and returns what it returns: (what it is about, how many tokens
# it will report, function).
Caller = Callable[[str, int, Callable[[Callable[[int], None]], Any]], Any]


@dataclass(frozen=True, slots=True)
class Comparison:
    workload: Workload
    runs: Mapping[Contender, Sequence[Run]]
    agreements: Sequence[Agreement]

    @property
    def figures(self) -> dict[Contender, dict[str, float]]:
        """Medians over the repeats."""
        return {contender: medians(runs) for contender, runs in self.runs.items()}

    @property
    def ratios(self) -> dict[Contender, float]:
        """Output tokens per second against the best static batching's; empty when none has run."""
        rates = {contender: figures["output_tokens_per_s"] for contender, figures in self.figures.items()}
        best = max((rate for contender, rate in rates.items() if contender.is_static), default=None)
        return {} if best is None else {contender: rate / best for contender, rate in rates.items()}

    @property
    def as_unbatched(self) -> bool:
        """Every answer of ours that was checked equals what transformers generates for the request alone."""
        checks = (a for a in self.agreements if a.right == UNBATCHED)
        return not any(check.differences for check in checks)

    def to_fields(self) -> dict[str, Any]:
        """For the JSON file."""
        workload, ratios = self.workload, self.ratios
        return {
            "model": workload.model,
            "dtype": "float32",
            "requests": len(workload.requests),
            "prompt_tokens": workload.num_prompt_tokens,
            "output_tokens": workload.num_output_tokens,
            "seats": workload.max_num_seqs,
            "broker": workload.bootstrap or "embedded",
            "contenders": {
                contender.value: {
                    "label": contender.label,
                    "medians": figures,
                    "ratio_to_best_static": ratios.get(contender),
                    "runs": [run.figures for run in self.runs[contender]],
                    "answers": [asdict(answer) for answer in self.runs[contender][-1].answers],  # of the last run
                }
                for contender, figures in self.figures.items()
            },
            "agreements": [asdict(agreed) for agreed in self.agreements],
        }


def compare(
    workload: Workload, contenders: Sequence[Contender], *, repeats: int, num_checked: int, call: Caller
) -> Comparison:
    """Runs the contenders in turns, then compares their tokens.

    Each with the first one's, and ours with what transformers generates for `num_checked` of the requests alone.
    """
    runs: dict[Contender, list[Run]] = {contender: [] for contender in contenders}
    for _ in range(repeats):
        for contender in contenders:
            run = call(contender.label, workload.num_output_tokens, partial(serve, contender, workload))
            runs[contender].append(run)
    answers = {contender.label: dict(enumerate(runs[contender][-1].answers)) for contender in contenders}
    pairs = [(contenders[0].label, other.label) for other in contenders[1:]]
    if num_checked:
        answers[UNBATCHED] = _generate_unbatched(workload, num_checked, call)
        pairs += [(ours.label, UNBATCHED) for ours in contenders if not ours.is_static]
    agreements = [agreement(left, answers[left], right, answers[right]) for left, right in pairs]
    return Comparison(workload, runs, [_with_logit_gaps(a, answers[a.left], workload, call) for a in agreements])


def _generate_unbatched(workload: Workload, num_checked: int, call: Caller) -> dict[int, Answer]:
    """For requests spread evenly from the shortest answer to the longest."""
    by_length = sorted(range(len(workload.requests)), key=lambda i: workload.requests[i].max_tokens)
    num_checked = min(num_checked, len(by_length))
    sample = [by_length[k * (len(by_length) - 1) // max(1, num_checked - 1)] for k in range(num_checked)]
    num_tokens = sum(workload.requests[i].max_tokens for i in sample)
    return call(UNBATCHED, num_tokens, partial(generate_unbatched, workload, sample))


def _with_logit_gaps(found: Agreement, answers: Mapping[int, Answer], workload: Workload, call: Caller) -> Agreement:
    if not found.differences:
        return found
    function = partial(logit_gaps, workload, answers, found.differences)
    return replace(found, logit_gaps=call("where the answers differ", len(found.differences), function))
