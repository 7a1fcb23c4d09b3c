"""`draftgraph train` in processes of its own: killed and gone on with, and two that share the work."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from draftgraph.model_zoo.training import checkpoints
from draftgraph.runtime.cli import app


@pytest.fixture(scope="module")
def arguments(tiny_model_path, tmp_path_factory):
    """Of a run of 60 updates on answered prompts, without `--out`."""
    draw = random.Random(3)
    file = tmp_path_factory.mktemp("answers") / "answers.jsonl"
    with file.open("w") as lines:
        for _ in range(50):
            start = draw.randrange(4, 250)
            ids = [start + step % 5 for step in range(draw.randrange(12, 30))]
            lines.write(json.dumps({"prompt_ids": ids[:3], "token_ids": ids[3:], "finish": "length"}) + "\n")
    return [
        *("train", "dspark", "--target", str(tiny_model_path), "--data", str(file), "--no-regenerate"),
        *("--target-dtype", "float32", "--num-drafts", "2", "--num-layers", "1", "--intermediate-size", "32"),
        *("--batch-tokens", "128", "--epochs", "4", "--option", "anchors=8", "--device", "cpu"),
    ]


def start(arguments, out: Path, *options: str, **environment: str) -> subprocess.Popen[str]:
    threads = str(torch.get_num_threads())
    return subprocess.Popen(
        [sys.executable, "-m", "draftgraph", *arguments, "--out", str(out), *options],
        env={**os.environ, "OMP_NUM_THREADS": threads, **environment},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def run_here(arguments, out: Path, *options: str) -> None:
    result = CliRunner().invoke(app, [*arguments, "--out", str(out), *options])
    assert result.exit_code == 0, result.stderr


def updates(out: Path) -> list[dict]:
    file = out / "training" / "log.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}") and '"loss"' in line]


def test_a_killed_run_goes_on_to_the_same_weights(arguments, tmp_path):
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    process = start(arguments, killed, "--save-every", "0")
    deadline = time.monotonic() + 120
    while len(updates(killed)) < 7:
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < deadline
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    saved = checkpoints.load(killed / "training")
    assert saved is not None
    run_here(arguments, killed)
    run_here(arguments, whole)
    ended = updates(whole)
    assert 0 < saved[2].step < len(ended), "killed in the middle"
    assert saved[2].batch > 0, "killed in the middle of an epoch"
    assert updates(killed) == ended
    one, two = (checkpoints.load(out / "training") for out in (killed, whole))
    assert all(torch.equal(one[0][name], two[0][name]) for name in two[0])
    assert (killed / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()


def free_port() -> str:
    with socket.socket() as place:
        place.bind(("127.0.0.1", 0))
        return str(place.getsockname()[1])


def test_two_processes_see_the_same_losses_as_one(arguments, tmp_path):
    # Two batches of each per update, and a rest at the end of an epoch in which their numbers may differ.
    options = ("--batches-per-step", "4", "--epochs", "2", "--states", "offline")
    port = free_port()
    processes = [
        start(
            arguments,
            tmp_path / "two",
            *options,
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            WORLD_SIZE="2",
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=port,
            ACCELERATE_USE_CPU="true",
        )
        for rank in range(2)
    ]
    run_here(arguments, tmp_path / "one", *options)
    said = [process.communicate(timeout=120)[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], said
    assert "held out" in said[0]
    assert "examples of" not in said[1], "only the first process speaks"
    one, two = updates(tmp_path / "one"), updates(tmp_path / "two")
    assert len(one) == len(two) > 5
    assert [entry["tokens"] for entry in one] == [entry["tokens"] for entry in two]
    for first, second in zip(one, two, strict=True):
        assert second["loss"] == pytest.approx(first["loss"], rel=1e-4)
        assert second["rates"] == pytest.approx(first["rates"], abs=0.02)


def test_processes_must_share_the_batches_evenly(arguments, tmp_path, monkeypatch):
    from draftgraph.runtime.errors import ConfigError
    from draftgraph.runtime.train import processes

    class Two:
        num_processes = 2
        distributed_type = type("Kind", (), {"value": "MULTI_CPU"})

    monkeypatch.setattr("accelerate.Accelerator", lambda **options: Two())
    with pytest.raises(
        ConfigError, match="batches_per_step is 3, which 2 processes cannot share evenly: use a multiple"
    ):
        processes.make_accelerator("cpu", 3)
