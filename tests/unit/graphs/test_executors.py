"""Which executor is taken, and what is said about the others."""

from __future__ import annotations

import logging

import pytest
import torch

from draftgraph.graphs import available_executors, choose_executor, executors
from draftgraph.graphs.probe import Finding


def test_auto_takes_the_best_available_and_says_why(caplog):
    with caplog.at_level(logging.INFO, logger="draftgraph.graphs"):
        assert choose_executor("auto", "cpu").name == "host"
    assert "executor: host" in caplog.text
    assert "loop: needs a CUDA device" in caplog.text


def test_an_executor_that_cannot_work_is_refused_not_replaced():
    with pytest.raises(ValueError, match="executor 'loop' cannot be used on cpu: needs a CUDA device"):
        choose_executor("loop", "cpu")


FOUND = {"loop": Finding(False, "the check crashed with SIGSEGV"), "round": Finding(True, "a small loop ran")}


def test_on_a_cuda_device_the_probe_decides_and_what_was_passed_over_is_said(monkeypatch, caplog, tmp_path):
    asked = []
    made = object()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(executors, "probe", lambda *args, **options: asked.append((args, options)) or FOUND)
    monkeypatch.setattr(executors, "create_executor", lambda name, device, observe_ops: (made, name, device))
    with caplog.at_level(logging.INFO, logger="draftgraph.graphs"):
        assert choose_executor("auto", "cuda", tmp_path) == (made, "round", torch.device("cuda"))
    (record,) = caplog.records
    assert record.message == ("executor: round (a small loop ran); passed over loop: the check crashed with SIGSEGV")
    assert asked == [((torch.device("cuda"), tmp_path), {"fresh": False})]
    with pytest.raises(ValueError, match="executor 'loop' cannot be used on cuda: the check crashed with SIGSEGV"):
        choose_executor("loop", "cuda", tmp_path)
    assert [s.available for s in available_executors("cuda", fresh=True)] == [False, True, True]
    assert asked[-1][1] == {"fresh": True}


def test_the_host_executor_asks_no_device(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(executors, "probe", lambda *args, **options: pytest.fail("nothing needs probing"))
    assert choose_executor("host", "cuda").name == "host"


def test_unknown_names_are_refused():
    with pytest.raises(ValueError, match="must be one of auto, loop, round, host; got 'fast'"):
        choose_executor("fast", "cpu")


def test_every_executor_has_a_reason():
    assert [s.name for s in available_executors("cpu")] == ["loop", "round", "host"]
    assert all(s.reason for s in available_executors("cpu"))
