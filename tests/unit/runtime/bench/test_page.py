"""The page and its plots, from a report made by hand."""

import dataclasses
import io
import re
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser

import pytest
from rich.console import Console

from draftgraph.runtime.bench import charts
from draftgraph.runtime.bench.charts import Series
from draftgraph.runtime.bench.html_page import render
from draftgraph.runtime.bench.records import Answer, Method, Pass, StepReport, StepSpan
from draftgraph.runtime.bench.report import BenchReport, method_figures, method_reports
from draftgraph.runtime.bench.runner import Measurements
from draftgraph.runtime.bench.tables import rows, show

PLAIN = Method(name="plain", engine="draftgraph", family="plain", depth=0, config={}, repeats_plain_text=True)
NGRAM = Method(name="ngram <K=2>", engine="draftgraph", family="ngram", depth=2, config={}, repeats_plain_text=True)
STEPS = StepReport(
    phase_seconds={"propose": 0.1, "verify": 0.7, "commit": 0.1},
    round_seconds=1.0,
    rounds=2,
    timeline=(StepSpan(phase="propose", start=0.0, seconds=0.05), StepSpan(phase="verify", start=0.05, seconds=0.4)),
    round_starts=(0.0, 0.5, 1.0),
    timeline_ends=True,
    round_tokens=(1, 3),
    bytes_per_round=1e9,
    floor_seconds=0.1,
)


def answer(tokens, latency, *, rounds, histogram, bursts, status="ok", prompt="one"):
    return Answer(
        prompt_set="echo",
        prompt=prompt,
        repeat=0,
        status=status,
        error=None if status == "ok" else "cut off <here>",
        token_ids=tokens,
        bursts=bursts,
        latency=latency,
        rounds=rounds,
        histogram=histogram,
    )


@pytest.fixture
def report():
    plain = answer((1, 2, 3, 4), 4.0, rounds=4, histogram=((4,),), bursts=((1.0, 1), (2.0, 1), (3.0, 1), (4.0, 1)))
    late = answer((1,), 9.0, rounds=1, histogram=((1,),), bursts=((1.0, 1),), status="timeout", prompt="two")
    # One round verified 2 drafts and accepted both; one had none.
    quick = answer(
        (1, 2, 3, 4), 2.0, rounds=2, histogram=((1, 0, 0), (0, 0, 0), (0, 0, 1)), bursts=((1.0, 1), (2.0, 3))
    )
    passes = (
        Pass(method="plain", answers=(plain,), seconds=4.0),
        Pass(method=NGRAM.name, answers=(quick,), seconds=2.0),
        Pass(method="plain", answers=(late,), seconds=1.0),
    )
    measured = Measurements(passes=passes, steps={NGRAM.name: STEPS}, planned=4)
    return BenchReport(
        created="2030-01-01T00:00:00+00:00",
        partial=measured.partial,
        settings={"model": "a<b", "dtype": "bfloat16", "ignore_eos": False, "max_tokens": 4, "repeats": 1, "peers": []},
        machine={"device_name": "a device"},
        rounding_may_differ=True,
        methods=method_reports([PLAIN, NGRAM], measured, {"plain": (10_000_000, 20_000_000)}),
    )


def test_the_figures_by_hand(report):
    table = dict(rows(report.methods, rounding_may_differ=True))
    assert table["output tokens/s"] == ["1.0", "2.0"]  # 5 tokens in 5 s; 4 in 2 s
    assert table["speed-up against plain"] == ["1.00 x", "2.00 x"]
    assert table["tokens per round"] == ["1.00", "2.00"]
    assert table["drafts accepted"] == ["-", "100%"]
    assert table["... at position 1, 2, ..."] == ["-", "100 100 %"]
    assert table["first token"] == ["1000 / 1000 ms", "1000 / 1000 ms"]
    # Waits between the tokens of ngram: 1 s, 0, 0; the 95th percentile lies 0.9 of the way from 0 to 1 s.
    assert table["between tokens"] == ["1000 / 1000 ms", "0.0 / 900 ms"]
    assert table["between bursts"] == ["1000 / 1000 ms", "1000 / 1000 ms"]
    assert table["whole answer"] == ["4000 / 4000 ms", "2000 / 2000 ms"]
    assert table["step verify"] == ["-", "350 ms"]
    assert table["round, in steps"] == ["-", "500 ms, 90%"]
    assert table["bytes moved at least"] == ["-", "1.0 GB/s"]
    assert table["of the device's limit"] == ["-", "10%"]
    assert table["memory held / peak"] == ["10 MB / 20 MB", "- / -"]
    assert table["answers"] == ["2", "1"]
    assert table["timed out"] == ["1", "0"]
    assert table["same text as plain"] == ["yes, all 1", "yes, all 1"]


def test_narrow_terminals_get_several_tables(report):
    three = dataclasses.replace(report, methods=(*report.methods, report.methods[1]))
    for width, tables in ((120, 1), (60, 2)):
        console = Console(file=io.StringIO(), width=width)
        show(three, console)
        out = console.file.getvalue()
        assert out.count("partial result") == tables
        assert out.count("output tokens/s") == 2 * tables
        assert "plain, echo/two" not in out.split("PARTIAL")[1]
        assert "plain, echo/two, repeat 1: timeout: cut off <here>" in out


def test_names_with_brackets_are_shown_as_they_are(report):
    first = report.methods[0]
    named = dataclasses.replace(first.method, name="[/b]")
    odd = dataclasses.replace(first, method=named, by_set={"[/red]": first.overall})
    console = Console(file=io.StringIO(), width=120)
    show(dataclasses.replace(report, methods=(odd,)), console)
    assert "[/b]" in console.file.getvalue()
    assert "[/red]: output tokens/s" in console.file.getvalue()


def test_a_position_without_drafts_has_no_acceptance():
    # One round verified two drafts and accepted one; no round had a third.
    histogram = ((2, 0, 0, 0), (0, 0, 0, 0), (0, 1, 0, 0), (0, 0, 0, 0))
    good = Answer(prompt_set="echo", prompt="one", repeat=0, status="ok", token_ids=(1,), histogram=histogram)
    one = Pass(method="ngram", answers=(good,), seconds=1.0)
    assert method_figures([one], [], None).acceptance_by_position == (1.0, 0.0)
    none = dataclasses.replace(good, histogram=((2, 0, 0, 0), *((0,) * 4,) * 3))
    assert method_figures([dataclasses.replace(one, answers=(none,))], [], None).acceptance_by_position == ()


class Page(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.tags, self.open = [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "link"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def all(self, name):
        return [attributes for tag, attributes in self.tags if tag == name]


def test_the_page_is_whole_and_needs_nothing_else(report):
    text = render(report)
    page = Page(text)
    assert page.open == []
    assert page.all("html") == [{"lang": "en"}]
    assert not page.all("script")
    assert not page.all("img")
    for _, attributes in page.tags:
        assert not attributes.keys() & {"src", "onload", "onclick"}
        assert not attributes.get("href", "data:,").startswith("http")
    assert "url(" not in text
    assert "@import" not in text
    assert {"width=device-width, initial-scale=1"} <= {meta.get("content") for meta in page.all("meta")}
    assert "prefers-color-scheme: dark" in text


def test_what_a_user_wrote_is_escaped(report):
    text = render(report)
    assert "a&lt;b" in text
    assert "ngram &lt;K=2&gt;" in text
    assert "cut off &lt;here&gt;" in text
    assert "<K=2>" not in text


def test_every_plot_has_a_name_and_its_values(report):
    text = render(report)
    assert re.findall(r"<figcaption>(.*?)</figcaption>", text) == [
        "Speed-up against K",
        "Acceptance by position",
        "Waits between bursts",
        "Rounds over time",
    ]
    for svg in re.findall(r"<svg.*?</svg>", text, flags=re.DOTALL):
        root = ElementTree.fromstring(svg)
        assert root.attrib["role"] == "img"
        assert root[0].tag.endswith("title")
        assert root[1].tag.endswith("desc")
        assert root[0].text
        assert root[1].text
        numbers = [float(value) for value in re.findall(r' (?:x1|x2|cx|x)="([^"]+)"', svg)]
        assert all(0 <= value <= charts.WIDTH for value in numbers)
    assert "PARTIAL" in text
    assert "Failed and timed out: 1" in text


def test_a_report_without_anything_to_plot(report):
    nothing = dataclasses.replace(
        report, methods=method_reports([PLAIN], Measurements(passes=(), steps={}, planned=1), {})
    )
    text = render(nothing)
    assert "<svg" not in text
    assert Page(text).open == []


def test_points_lie_where_they_should():
    svg = charts.lines(
        "t", "d", [Series(name="s", points=((0.0, 0.0), (2.0, 1.0)))], x_label="x", y_label="y", percent=True
    )
    (low, high) = re.findall(r'<circle cx="([\d.]+)" cy="([\d.]+)"', svg)[:2]
    left, right = float(low[0]), float(high[0])
    assert 58 < left < right < charts.WIDTH
    assert float(high[1]) < float(low[1])
    assert svg.count("<circle") == 3  # two points and one in the legend


def test_bars_count_the_waits():
    svg = charts.histograms("t", "d", {"m": [1.0, 1.0, 1.0, 9.0]}, unit="ms")
    heights = sorted(float(value) for value in re.findall(r'<rect class="bar c0"[^>]*height="([\d.]+)"', svg))
    assert heights == [pytest.approx(58 / 3, abs=0.1), 58.0]
    assert "m: 4 waits" in svg


def test_timelines_end_where_the_shortest_unfinished_one_does():
    longer = dataclasses.replace(STEPS, round_starts=(0.0, 1.0, 2.0), timeline_ends=False)
    both = {"a": (STEPS, (1, 3)), "b": (longer, (1, 1))}
    svg = charts.timelines("t", "d", both, ["propose", "verify", "commit"])
    assert "a: 2 rounds, 4 tokens" in svg
    assert "b: 2 rounds, 2 tokens" in svg
    assert ">2000<" in svg
    cut = {"a": (dataclasses.replace(STEPS, timeline_ends=False), (1, 3)), "b": (longer, (1, 1))}
    svg = charts.timelines("t", "d", cut, ["propose", "verify", "commit"])
    assert "b: 1 rounds, 1 tokens" in svg
    assert ">1000<" in svg
