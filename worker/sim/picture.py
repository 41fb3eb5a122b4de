"""A simulation as an SVG picture: seats, waiting and KV over time, and the distribution of TTFT per tier."""

import html
import math
from collections.abc import Callable, Sequence
from itertools import chain

from worker.sim.levels import Levels
from worker.sim.replay import WorkerRun

_WIDTH, _HEIGHT = 860, 640
_LEFT, _PLOT_WIDTH, _PLOT_HEIGHT = 70, 650, 220
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#555555")
_MAX_CURVE_POINTS = 200
TOPS = (60, 370)

Curve = tuple[str, Sequence[tuple[float, float]]]  # label, points (x, y)


def draw(runs: Sequence[WorkerRun], levels: Levels, title: str) -> str:
    """The SVG document. The panel over time shows the first worker only."""
    points = runs[0].timeline.points
    seats: list[Curve] = [
        ("running", [(p.at, p.num_running) for p in points]),
        ("waiting", [(p.at, p.num_waiting) for p in points]),
        ("KV slots filled, %", [(p.at, 100 * p.kv_use) for p in points]),
    ]
    served = [s for run in runs for s in run.served]
    curves: list[Curve] = []
    for name in levels.tiers:
        ttfts = sorted(s.ttft for s in served if s.tier == name and s.ttft is not None)
        if ttfts:
            curves.append((name, _distribution(ttfts)))
    return document(
        title,
        panel(TOPS[0], "worker 1 over time (s)", seats, float, ""),
        panel(TOPS[1], "share of requests with a first token within (s), by tier", curves, math.log10, "%"),
    )


def _escape(text: str) -> str:
    """As XML; characters that no XML document may hold, escaped or not, become U+FFFD."""
    return html.escape("".join(c if c.isprintable() else "\ufffd" for c in text))


def document(title: str, *panels: Sequence[str]) -> str:
    """The SVG document of two panels, which begin at TOPS."""
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{_HEIGHT}" '
        f'viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif" font-size="12">'
    )
    paper = f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>'
    heading = f'<text x="{_LEFT}" y="24" font-size="15" font-weight="bold">{_escape(title)}</text>'
    return "\n".join([head, paper, heading, *chain.from_iterable(panels), "</svg>", ""])


def _distribution(ordered: Sequence[float]) -> list[tuple[float, float]]:
    """(seconds, percent of the values at most that), at up to _MAX_CURVE_POINTS values."""
    last = len(ordered) - 1
    picked = dict.fromkeys(round(i * last / _MAX_CURVE_POINTS) for i in range(_MAX_CURVE_POINTS + 1))
    return [(max(ordered[i], 1e-4), 100 * (i + 1) / len(ordered)) for i in picked]


def panel(top: int, title: str, curves: Sequence[Curve], scale: Callable[[float], float], unit: str) -> list[str]:
    """A frame with grid, curves and legend. `scale` maps x before it is drawn; y begins at 0."""
    xs = [x for _, points in curves for x, _ in points] or [1.0]
    low, high = scale(min(xs)), scale(max(xs))
    span = (high - low) or 1.0
    peak = max((y for _, points in curves for _, y in points), default=1.0) or 1.0
    bottom = top + _PLOT_HEIGHT
    lines = [
        f'<text x="{_LEFT}" y="{top - 8}" fill="#444">{_escape(title)}</text>',
        f'<rect x="{_LEFT}" y="{top}" width="{_PLOT_WIDTH}" height="{_PLOT_HEIGHT}" fill="none" stroke="#bbb"/>',
    ]
    for i in range(5):
        y = bottom - _PLOT_HEIGHT * i / 4
        lines.append(f'<line x1="{_LEFT}" y1="{y:.1f}" x2="{_LEFT + _PLOT_WIDTH}" y2="{y:.1f}" stroke="#eee"/>')
        lines.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{_number(peak * i / 4)}{unit}</text>')
        x = _LEFT + _PLOT_WIDTH * i / 4
        value = low + span * i / 4
        label = _number(10**value if scale is math.log10 else value)
        lines.append(f'<text x="{x:.1f}" y="{bottom + 16}" text-anchor="middle">{label}</text>')
    for i, (name, points) in enumerate(curves):
        colour = _COLOURS[i % len(_COLOURS)]
        path = " ".join(
            f"{_LEFT + _PLOT_WIDTH * (scale(x) - low) / span:.1f},{bottom - _PLOT_HEIGHT * y / peak:.1f}"
            for x, y in points
        )
        lines.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        legend_y = top + 14 + 18 * i
        lines.append(f'<text x="{_LEFT + _PLOT_WIDTH + 10}" y="{legend_y}" fill="{colour}">{_escape(name)}</text>')
    return lines


def _number(value: float) -> str:
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"
