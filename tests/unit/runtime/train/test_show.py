"""What is shown while a head learns."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from draftgraph.model_zoo.training.checkpoints import Position
from draftgraph.model_zoo.training.loop import Acceptance, Progress
from draftgraph.runtime.train.show import training_progress


def shown(drafts: int, **console) -> str:
    """The last line, after some updates."""
    file = io.StringIO()
    rates = tuple(0.61 * 0.9**place for place in range(drafts))
    with training_progress(Console(file=file, **console), every=0.0) as watch:
        for step in (340, 341, 342):
            position = Position(step=step, tokens=step * 1000, seconds=1.0)
            watch(Progress(position, 1000, 12.345, rates, Acceptance(2.0, rates), {}))
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", file.getvalue())
    return [line for line in re.split(r"[\r\n]+", text) if line.strip()][-1]


@pytest.mark.parametrize("drafts", [1, 4, 40])
@pytest.mark.parametrize("width", [80, 100, 120, 200])
def test_the_most_important_has_room_on_a_terminal(width, drafts):
    line = shown(drafts, width=width, force_terminal=True)
    assert len(line.rstrip()) <= width
    for part in (r"34%", r"loss 12\.345", r"held out 0\.61", r"\d\.\d\d per round", r"\d+ tokens/s", r"\d+:\d\d left"):
        assert re.search(part, line), (part, line)
    assert "\u2026" not in line


def test_a_wide_terminal_has_a_bar_and_more():
    line = shown(4, width=200, force_terminal=True)
    assert "training" in line
    assert "accepted 0.61 0.55 0.49 0.44, held out 0.61 0.55 0.49 0.44, " in line


def test_where_there_is_no_terminal_long_lists_are_cut():
    assert "held out 0.61 0.55 0.49 0.44 0.40 0.36 0.32 0.29, " in shown(8, width=80)
    line = shown(40, width=80)
    assert line.startswith("update 342 of 1000: loss 12.345, accepted 0.61 0.55 0.49 0.44 .. 0.01, held out 0.61 0.55 ")
