"""The report as one page that needs nothing else: no script, no font, no picture from anywhere."""

from __future__ import annotations

import html
import json
from collections.abc import Iterable, Sequence

from . import charts
from .charts import Series
from .figures import burst_waits
from .report import BenchReport, MethodReport
from .tables import failures, notes, number, phases_of, rows, set_rows

_STYLE = """
:root { color-scheme: light dark;
  --ground: #ffffff; --text: #1b1f24; --soft: #57606a; --edge: #d0d7de; --panel: #f6f8fa; --alert: #b42318;
  --c0: #0072b2; --c1: #d55e00; --c2: #009e73; --c3: #aa4499; --c4: #8a6d00; --c5: #5b6770; }
@media (prefers-color-scheme: dark) { :root {
  --ground: #12161b; --text: #e6e9ec; --soft: #a3adb8; --edge: #3a434d; --panel: #1a2027; --alert: #ff9b8f;
  --c0: #56b4e9; --c1: #f0883e; --c2: #2fc59b; --c3: #d68fd0; --c4: #e3c342; --c5: #aab4be; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 16px; max-width: 1200px; background: var(--ground); color: var(--text);
  font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; line-height: 1.25; margin: 0 0 4px; }
h2 { font-size: 1.15rem; margin: 32px 0 8px; }
p { margin: 4px 0; } .soft { color: var(--soft); } .alert { color: var(--alert); font-weight: 600; }
.scroll { overflow-x: auto; border: 1px solid var(--edge); border-radius: 6px; }
.scroll:focus-visible, summary:focus-visible { outline: 3px solid var(--c0); outline-offset: 2px; }
table { border-collapse: collapse; width: 100%; font-size: 0.9rem; font-variant-numeric: tabular-nums; }
th, td { padding: 5px 10px; border-bottom: 1px solid var(--edge); text-align: right; vertical-align: top; }
td { min-width: 7.5rem; }
tr:last-child th, tr:last-child td { border-bottom: 0; }
th:first-child { text-align: left; font-weight: 500; position: sticky; left: 0; background: var(--panel);
  min-width: 118px; max-width: 260px; }
@media (min-width: 900px) { th:first-child { min-width: 205px; } }
thead th { background: var(--panel); font-weight: 600; }
.plots { display: grid; gap: 24px; grid-template-columns: repeat(auto-fit, minmax(min(100%, 480px), 1fr)); }
figure { margin: 0; min-width: 0; } figcaption { font-weight: 600; margin-bottom: 4px; }
figure p { font-size: 0.9rem; }
svg { display: block; width: 100%; max-width: 540px; height: auto; }
svg text { fill: var(--text); font: 12px system-ui, sans-serif; } svg .small { font-size: 9px; }
.grid { stroke: var(--edge); stroke-width: 1; } .axis { stroke: var(--text); stroke-width: 1; }
.line { fill: none; stroke-width: 2; }
.line.c0 { stroke: var(--c0); } .line.c1 { stroke: var(--c1); } .line.c2 { stroke: var(--c2); }
.line.c3 { stroke: var(--c3); } .line.c4 { stroke: var(--c4); } .line.c5 { stroke: var(--c5); }
.bar.c0 { fill: var(--c0); } .bar.c1 { fill: var(--c1); } .bar.c2 { fill: var(--c2); }
.bar.c3 { fill: var(--c3); } .bar.c4 { fill: var(--c4); } .bar.c5 { fill: var(--c5); }
summary { cursor: pointer; color: var(--soft); font-size: 0.9rem; padding: 6px 0; }
ul { padding-left: 20px; overflow-wrap: anywhere; } dl { display: grid; gap: 2px 16px; margin: 0;
  grid-template-columns: max-content 1fr; font-size: 0.9rem; } dt { color: var(--soft); } dd { margin: 0;
  overflow-wrap: anywhere; }
@media (max-width: 600px) { dl { grid-template-columns: 1fr; } dd { margin-bottom: 6px; } }
""".strip()


def render(report: BenchReport) -> str:
    """The page as HTML."""
    names = [one.method.name for one in report.methods]
    lost = failures(report.methods)
    parts = [
        f"<h1>draftgraph bench: {_text(report.settings['model'])}</h1>",
        f'<p class="soft">{_text(report.created)}, {_text(report.machine["device_name"])}, '
        f"{_text(report.settings['dtype'])}</p>",
        *(_note(line) for line in notes(report)),
        "<h2>Figures</h2>",
        _table("Figures of every method", names, rows(report.methods, rounding_may_differ=report.rounding_may_differ)),
        "<h2>By prompt set</h2>",
        _table("Speed and acceptance by prompt set", names, set_rows(report.methods)),
        f"<h2>Failed and timed out: {len(lost)}</h2>",
        _list(lost) if lost else "<p>No answer failed or timed out.</p>",
        "<h2>Plots</h2>",
        f'<div class="plots">{"".join(_plots(report.methods))}</div>',
        "<h2>Machine and settings</h2>",
        _definitions({**report.machine, **report.settings}.items()),
    ]
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'; "
        'img-src data:">\n<link rel="icon" href="data:,">\n'
        f"<title>draftgraph bench: {_text(report.settings['model'])}</title>\n<style>\n{_STYLE}\n</style>\n</head>\n"
        f"<body>\n<main>\n{chr(10).join(parts)}\n</main>\n</body>\n</html>\n"
    )


def _plots(reports: Sequence[MethodReport]) -> list[str]:
    found = []
    speeds = _speed_ups(reports)
    if speeds:
        svg = charts.lines(
            "Speed-up against K",
            "Speed-up against plain decoding by the most drafts per round; the values are in the table below.",
            speeds,
            x_label="K, the most drafts per round (0: plain decoding)",
            y_label="speed-up",
        )
        found.append(
            _figure("Speed-up against K", "Against draftgraph's plain decoding, 1.", svg, _points(speeds, "K"))
        )
    accepted = [
        Series(
            name=one.method.name,
            points=tuple((i + 1.0, share) for i, share in enumerate(one.overall.acceptance_by_position)),
        )
        for one in reports
        if one.overall.acceptance_by_position
    ]
    if accepted:
        svg = charts.lines(
            "Acceptance by position",
            "Share of accepted drafts by position in the window; the values are in the table below.",
            accepted,
            x_label="position of the draft",
            y_label="accepted",
            percent=True,
        )
        note = "Of the rounds that verified a draft at this position, the share that accepted it."
        found.append(_figure("Acceptance by position", note, svg, _points(accepted, "position")))
    waits = {
        one.method.name: [
            wait * 1e3 for answer in one.answers if answer.status == "ok" for wait in burst_waits(answer.bursts)
        ]
        for one in reports
    }
    waits = {name: values for name, values in waits.items() if values}
    if waits:
        svg = charts.histograms(
            "Waits between bursts",
            "How long a reader waits for the next tokens, by method; median and 95th percentile are in the figures.",
            waits,
            unit="milliseconds between bursts",
        )
        note = "Solid: median; dashed: 95th percentile. Bars are scaled to the tallest; the last counts longer waits."
        found.append(_figure("Waits between bursts", note, svg, None))
    timed = {
        one.method.name: (one.steps, one.steps.round_tokens)
        for one in reports
        if one.steps is not None and one.steps.timeline
    }
    if timed:
        phases = phases_of(reports)
        svg = charts.timelines(
            "Rounds over time",
            "The steps of the first rounds of each method on one time axis, with the tokens of each round.",
            timed,
            phases,
        )
        note = "The first rounds of the first prompt, step by step; below each round, the tokens that it gave."
        found.append(_figure("Rounds over time", note, svg, None))
    return found


def _speed_ups(reports: Sequence[MethodReport]) -> list[Series]:
    """Per family and prompt set, (K, speed-up); a family begins with its own plain decoding where it has one."""
    starts = {one.method.engine: one for one in reports if one.method.depth == 0}
    series = []
    for family in dict.fromkeys(one.method.family for one in reports if one.method.depth):
        members = [one for one in reports if one.method.family == family and one.method.depth is not None]
        start = starts.get(members[0].method.engine)
        for name in dict.fromkeys(name for one in members for name in one.by_set):
            points = [
                (float(one.method.depth or 0), one.by_set[name].speed_up)
                for one in (*([start] if start else []), *members)
                if name in one.by_set
            ]
            drawn = tuple(sorted((x, y) for x, y in points if y is not None))
            if drawn:
                series.append(Series(name=f"{family}, {name}", points=drawn))
    return series


def _points(series: Sequence[Series], corner: str) -> str:
    places = sorted({x for one in series for x, _ in one.points})
    body = [(one.name, [number(dict(one.points).get(place), ".2f") for place in places]) for one in series]
    return _table("Values of the plot", [f"{place:g}" for place in places], body, corner)


def _figure(title: str, note: str, svg: str, values: str | None) -> str:
    more = f"<details><summary>Values</summary>{values}</details>" if values else ""
    return f'<figure><figcaption>{_text(title)}</figcaption>{svg}<p class="soft">{_text(note)}</p>{more}</figure>'


def _table(
    label: str, columns: Sequence[str], body: Sequence[tuple[str, Sequence[str]]], corner: str = "method"
) -> str:
    head = "".join(f'<th scope="col">{_text(name)}</th>' for name in columns)
    lines = "".join(
        f'<tr><th scope="row">{_text(name)}</th>{"".join(f"<td>{_text(cell)}</td>" for cell in cells)}</tr>'
        for name, cells in body
    )
    top = f'<th scope="col"><span class="soft">{_text(corner)}</span></th>{head}'
    return (
        f'<div class="scroll" role="region" tabindex="0" aria-label="{_text(label)}">'
        f"<table><thead><tr>{top}</tr></thead><tbody>{lines}</tbody></table></div>"
    )


def _note(line: str) -> str:
    loud = line.split(":")[0].isupper()
    return f'<p class="alert" role="alert">{_text(line)}</p>' if loud else f'<p class="soft">{_text(line)}</p>'


def _list(lines: Sequence[str]) -> str:
    return "<ul>" + "".join(f"<li>{_text(line)}</li>" for line in lines) + "</ul>"


def _definitions(items: Iterable[tuple[str, object]]) -> str:
    def shown(value: object) -> str:
        return value if isinstance(value, str) else json.dumps(value)

    pairs = "".join(f"<dt>{_text(key.replace('_', ' '))}</dt><dd>{_text(shown(value))}</dd>" for key, value in items)
    return f"<dl>{pairs}</dl>"


def _text(value: object) -> str:
    return html.escape(str(value))
