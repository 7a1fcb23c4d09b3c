"""Which executor is taken, and what is said about the others."""

from __future__ import annotations

import logging

import pytest

from draftgraph.graphs import available_executors, choose_executor


def test_auto_takes_the_best_available_and_says_why(caplog):
    with caplog.at_level(logging.INFO, logger="draftgraph.graphs"):
        assert choose_executor("auto", "cpu").name == "host"
    assert "executor: host" in caplog.text
    assert "loop: needs a CUDA device" in caplog.text


def test_an_executor_that_cannot_work_is_refused_not_replaced():
    with pytest.raises(ValueError, match="executor 'loop' cannot be used on cpu: needs a CUDA device"):
        choose_executor("loop", "cpu")


def test_unknown_names_are_refused():
    with pytest.raises(ValueError, match="must be one of auto, loop, round, host; got 'fast'"):
        choose_executor("fast", "cpu")


def test_every_executor_has_a_reason():
    assert [s.name for s in available_executors("cpu")] == ["loop", "round", "host"]
    assert all(s.reason for s in available_executors("cpu"))
