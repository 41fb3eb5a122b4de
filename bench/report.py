"""A comparison for people: the table, and a line per pair of contenders that should say the same."""

from rich import box
from rich.table import Table

from bench.comparison import Comparison
from bench.measure import Agreement

_SHOWN_DIFFERENCES = 3


def figures_table(comparison: Comparison, *, markdown: bool) -> Table:
    """Medians of the repeats; the tokens a second also against the best static batching."""
    table = Table(box=box.MARKDOWN if markdown else box.SIMPLE_HEAD)
    table.add_column("", no_wrap=True)
    headings = ("tokens/s", "ratio", "wall", "latency p50", "p99", "TTFT p50", "p99", "slots used", "KV used")
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    ratios = comparison.ratios
    for contender, figures in comparison.figures.items():
        seconds = ("wall_s", "latency_p50_s", "latency_p99_s", "ttft_p50_s", "ttft_p99_s")
        table.add_row(
            contender.label,
            f"{figures['output_tokens_per_s']:.1f}",
            f"{ratios[contender]:.2f}" if ratios else "-",
            *(f"{figures[name]:.2f} s" for name in seconds),
            f"{figures['slot_use']:.0%}",
            f"{figures['kv_use']:.0%}" if "kv_use" in figures else "-",
        )
    return table


def agreement_line(agreement: Agreement) -> str:
    """How many answers are the same, and where the first others part."""
    num_same = agreement.num_compared - len(agreement.differences)
    line = f"{agreement.left} and {agreement.right}: {num_same} of {agreement.num_compared} answers are the same"
    places = [
        f"request {d.request} at token {d.position} (logits {gap:.1e} apart)"
        for d, gap in zip(agreement.differences, agreement.logit_gaps, strict=True)
    ]
    hidden = len(places) - _SHOWN_DIFFERENCES
    if hidden > 0:
        places[_SHOWN_DIFFERENCES:] = [f"{hidden} more (at most {max(agreement.logit_gaps):.1e} apart)"]
    return f"{line}; they part in {', '.join(places)}" if places else line
