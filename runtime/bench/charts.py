"""Plots as SVG, drawn for a box 400 units wide so that their text stays readable on a phone.

Colours are classes that the page's style sheet defines for light and dark; every series has a mark or dash of its own
too, and a name, so that no plot depends on colour.
"""

from __future__ import annotations

import html
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .figures import counts_in_bins, nice_step, quantile
from .records import StepReport

WIDTH = 400
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 18, 8, 38
_DASHES = ("", "6 3", "2 3", "8 3 2 3", "1 2", "10 4")
SERIES_COLOURS = 6
"""Classes c0 to c5."""
_BINS = 24


@dataclass(frozen=True, kw_only=True)
class Series:
    """Named points of a line plot, in order of x."""

    name: str
    points: tuple[tuple[float, float], ...]


def lines(
    title: str, description: str, series: Sequence[Series], *, x_label: str, y_label: str, percent: bool = False
) -> str:
    """A line plot with a mark at each point; the y axis begins at 0. With `percent`, y is a share up to 1."""
    xs = [x for one in series for x, _ in one.points]
    ys = [y for one in series for _, y in one.points]
    x_low, x_high = min(xs), max(xs)
    if x_low == x_high:
        x_low, x_high = x_low - 1, x_high + 1
    y_step = 0.25 if percent else nice_step(max(ys), 5)
    y_high = 1.0 if percent else y_step * max(1, -(-max(ys) // y_step))
    legend = 18 * len(series)
    height = 240 + legend
    frame = _Frame(x_low, x_high, 0.0, y_high, bottom=height - _BOTTOM - legend)
    body = [frame.grid(y_step, percent=percent)]
    for x in sorted(set(xs)) if len(set(xs)) <= 10 else _steps(x_low, x_high, nice_step(x_high - x_low, 8)):
        body.append(_text(frame.x(x), frame.bottom + 15, f"{x:g}", anchor="middle"))
    for number, one in enumerate(series):
        colour = f"c{number % SERIES_COLOURS}"
        dash = _DASHES[number % len(_DASHES)]
        path = " ".join(f"{frame.x(x):.1f},{frame.y(y):.1f}" for x, y in one.points)
        body.append(f'<polyline class="line {colour}" stroke-dasharray="{dash}" points="{path}"/>')
        body += [_mark(number, frame.x(x), frame.y(y), colour) for x, y in one.points]
        y = height - legend + 18 * number + 8
        body.append(_line(f"line {colour}", _LEFT, y, _LEFT + 30, y, dash))
        body.append(_mark(number, _LEFT + 15, y, colour))
        body.append(_text(_LEFT + 38, y + 4, one.name))
    body.append(frame.labels(x_label, y_label))
    return _svg(title, description, height, body)


def histograms(title: str, description: str, values: Mapping[str, Sequence[float]], *, unit: str) -> str:
    """A histogram per series, one below the other on one x axis, with marks at the median and the 95th percentile.

    The axis ends at the largest 99th percentile; the last bin also counts what lies beyond it.
    """
    highest = max(quantile(found, 0.99) or 0.0 for found in values.values())
    step = nice_step(highest, 6)
    end = step * max(1, -(-highest // step))
    edges = [end * i / _BINS for i in range(_BINS + 1)]
    row, gap = 58, 26
    height = _TOP + len(values) * (row + gap) + _BOTTOM
    bottom = height - _BOTTOM
    frame = _Frame(0.0, end, 0.0, 1.0, bottom=bottom, left=12)
    body = []
    for x in _steps(0.0, end, step):
        body.append(_line("grid", frame.x(x), _TOP, frame.x(x), bottom))
        body.append(_text(frame.x(x), bottom + 15, f"{x:g}", anchor="middle"))
    for number, (name, found) in enumerate(values.items()):
        base = _TOP + (number + 1) * (row + gap) - 4
        counts = counts_in_bins(found, edges)
        tallest = max(counts) or 1
        colour = f"c{number % SERIES_COLOURS}"
        body.append(_text(frame.left, base - row - 8, f"{name}: {len(found)} waits"))
        for i, count in enumerate(counts):
            if count:
                left, right = frame.x(edges[i]), frame.x(edges[i + 1])
                tall = row * count / tallest
                body.append(
                    f'<rect class="bar {colour}" x="{left + 0.5:.1f}" y="{base - tall:.1f}" '
                    f'width="{right - left - 1:.1f}" height="{tall:.1f}"/>'
                )
        body.append(_line("axis", frame.left, base, frame.right, base))
        for share, dash in ((0.5, ""), (0.95, "3 2")):
            at = frame.x(min(quantile(found, share) or 0.0, end))
            body.append(_line("axis", at, base - row, at, base, dash))
    body.append(_text((frame.left + frame.right) / 2, height - 6, unit, anchor="middle"))
    return _svg(title, description, height, body)


def timelines(
    title: str, description: str, reports: Mapping[str, tuple[StepReport, Sequence[int]]], phases: Sequence[str]
) -> str:
    """The first rounds of every method on one time axis; each step has a colour, each round the number of its tokens.

    Args:
        title: of the plot.
        description: for those who do not see it.
        reports: by method, with the tokens that each round of the timeline emitted, where they are known.
        phases: all steps, in the order of a round; they give the colours.
    """
    ends = [report.round_starts[-1] * 1e3 for report, _ in reports.values()]
    # What is shown of a method must not look like its end where there is more of it.
    cut = [end for end, (report, _) in zip(ends, reports.values(), strict=True) if not report.timeline_ends]
    end = min(cut) if cut else max(ends)
    step = nice_step(end, 6)
    row = 50
    legend = 18 * -(-len(phases) // 3)
    height = _TOP + row * len(reports) + _BOTTOM + legend
    bottom = height - _BOTTOM - legend
    frame = _Frame(0.0, end, 0.0, 1.0, bottom=bottom, left=12)
    body = []
    for x in _steps(0.0, end, step):
        body.append(_line("grid", frame.x(x), _TOP, frame.x(x), bottom))
        body.append(_text(frame.x(x), bottom + 15, f"{x:g}", anchor="middle"))
    for number, (name, (report, tokens)) in enumerate(reports.items()):
        top = _TOP + row * number
        shown = sum(start * 1e3 < end for start in report.round_starts[:-1])
        total = f", {sum(tokens[:shown])} tokens" if len(tokens) >= shown else ""
        body.append(_text(frame.left, top + 12, f"{name}: {shown} rounds{total}"))
        for span in report.timeline:
            left, right = span.start * 1e3, min((span.start + span.seconds) * 1e3, end)
            if left < right:
                colour = f"c{phases.index(span.phase) % SERIES_COLOURS}"
                wide = max(0.4, frame.x(right) - frame.x(left))
                place = f'x="{frame.x(left):.2f}" y="{top + 18}" width="{wide:.2f}" height="14"'
                body.append(
                    f'<rect class="bar {colour}" {place}>'
                    f"<title>{html.escape(span.phase)}: {span.seconds * 1e3:.3g} ms</title></rect>"
                )
        for i, start in enumerate(report.round_starts[:-1]):
            at = frame.x(start * 1e3)
            if start * 1e3 < end:
                body.append(_line("axis", at, top + 16, at, top + 34))
                nearest = report.round_starts[i + 1]
                middle = (at + min(frame.x(nearest * 1e3), frame.right)) / 2
                if i < len(tokens) and frame.x(nearest * 1e3) - at > 9:
                    body.append(_text(middle, top + 44, str(tokens[i]), anchor="middle", small=True))
    body.append(_text((frame.left + frame.right) / 2, bottom + 31, "milliseconds", anchor="middle"))
    for i, phase in enumerate(phases):
        x, y = 12 + 128 * (i % 3), height - legend + 18 * (i // 3) + 4
        body.append(f'<rect class="bar c{i % SERIES_COLOURS}" x="{x}" y="{y}" width="10" height="10"/>')
        body.append(_text(x + 15, y + 9, phase))
    return _svg(title, description, height, body)


@dataclass(frozen=True)
class _Frame:
    """Where a plot's values lie in its box."""

    x_low: float
    x_high: float
    y_low: float
    y_high: float
    bottom: float
    left: float = _LEFT

    @property
    def right(self) -> float:
        return WIDTH - _RIGHT

    def x(self, value: float) -> float:
        pad = 8.0 if self.left == _LEFT else 0.0
        span = self.right - self.left - 2 * pad
        return self.left + pad + span * (value - self.x_low) / (self.x_high - self.x_low)

    def y(self, value: float) -> float:
        return self.bottom - (self.bottom - _TOP) * (value - self.y_low) / (self.y_high - self.y_low)

    def grid(self, step: float, *, percent: bool) -> str:
        parts = []
        for value in _steps(self.y_low, self.y_high, step):
            y = self.y(value)
            parts.append(_line("grid", self.left, y, self.right, y))
            label = f"{value:.0%}" if percent else f"{value:g}"
            parts.append(_text(self.left - 5, y + 4, label, anchor="end"))
        return "".join(parts)

    def labels(self, x_label: str, y_label: str) -> str:
        turned = f'transform="translate(11 {(self.bottom + _TOP) / 2:.1f}) rotate(-90)"'
        return _text((self.left + self.right) / 2, self.bottom + 31, x_label, anchor="middle") + (
            f'<text {turned} text-anchor="middle">{html.escape(y_label)}</text>'
        )


def _steps(low: float, high: float, step: float) -> list[float]:
    """Multiples of `step` from `low` to `high`."""
    values = itertools.takewhile(lambda v: v <= high + step * 1e-6, (low + i * step for i in itertools.count()))
    return [round(value, 12) for value in values]


def _line(kind: str, x1: float, y1: float, x2: float, y2: float, dash: str = "") -> str:
    place = f'x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"'
    dashes = f' stroke-dasharray="{dash}"' if dash else ""
    return f'<line class="{kind}"{dashes} {place}/>'


def _text(x: float, y: float, text: str, *, anchor: str = "start", small: bool = False) -> str:
    kind = ' class="small"' if small else ""
    return f'<text{kind} x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{html.escape(text)}</text>'


def _mark(number: int, x: float, y: float, colour: str) -> str:
    """A filled shape, another for each series."""
    shapes = (
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5"',
        f'<rect x="{x - 3.2:.1f}" y="{y - 3.2:.1f}" width="6.4" height="6.4"',
        f'<path d="M{x:.1f} {y - 4.5:.1f}l4.4 7.6h-8.8z"',
        f'<path d="M{x:.1f} {y - 4.8:.1f}l4.8 4.8-4.8 4.8-4.8-4.8z"',
    )
    return f'{shapes[number % len(shapes)]} class="bar {colour}"/>'


def _svg(title: str, description: str, height: float, body: Sequence[str]) -> str:
    return (
        f'<svg role="img" viewBox="0 0 {WIDTH} {height:g}" xmlns="http://www.w3.org/2000/svg">'
        f"<title>{html.escape(title)}</title><desc>{html.escape(description)}</desc>{''.join(body)}</svg>"
    )
