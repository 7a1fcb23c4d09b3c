"""`draftgraph train` in processes of its own: killed and gone on with, and two that share the work."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

from draftgraph.model_zoo.draft_files import open_tensors
from draftgraph.model_zoo.training import checkpoints
from draftgraph.runtime.cli import app
from draftgraph.runtime.train import run as run_module


@pytest.fixture(scope="module")
def arguments(tiny_model_path, tmp_path_factory):
    """Of a run of some 60 updates on answered prompts, without `--out`."""
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
        *("--batch-tokens", "64", "--epochs", "3", "--option", "anchors=8", "--device", "cpu"),
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


def run_here(arguments, out: Path, *options: str, code: int = 0) -> None:
    result = CliRunner().invoke(app, [*arguments, "--out", str(out), *options])
    assert result.exit_code == code, result.stderr


def start_two(arguments, out: Path, *options: str, **environment: str) -> list[subprocess.Popen[str]]:
    port = free_port()
    return [
        start(
            arguments,
            out,
            *options,
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            WORLD_SIZE="2",
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=port,
            ACCELERATE_USE_CPU="true",
            **environment,
        )
        for rank in range(2)
    ]


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


# Two batches of each of two processes per update, and a rest at the end of an epoch in which their numbers may differ.
SHARED = ("--batches-per-step", "4", "--epochs", "2", "--states", "offline")


@pytest.fixture(scope="module")
def one(arguments, tmp_path_factory) -> Path:
    """The directory of a run in one process."""
    out = tmp_path_factory.mktemp("one")
    run_here(arguments, out, *SHARED)
    return out


def assert_same_losses(here: Path, there: Path) -> None:
    one, two = updates(here), updates(there)
    assert len(one) == len(two) > 5
    assert [entry["tokens"] for entry in one] == [entry["tokens"] for entry in two]
    for first, second in zip(one, two, strict=True):
        assert second["loss"] == pytest.approx(first["loss"], rel=1e-4)
        assert second["rates"] == pytest.approx(first["rates"], abs=0.02)


def test_two_processes_see_the_same_losses_as_one(arguments, one, tmp_path):
    processes = start_two(arguments, tmp_path, *SHARED)
    said = [process.communicate(timeout=120)[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], said
    assert "held out" in said[0]
    assert "examples of" not in said[1], "only the first process speaks"
    assert_same_losses(one, tmp_path)


LAUNCHED_FSDP = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_SHARDING_STRATEGY": "FULL_SHARD",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
    "FSDP_OFFLOAD_PARAMS": "false",
    "FSDP_MIN_NUM_PARAMS": "100000000",
    "FSDP_FORWARD_PREFETCH": "false",
    "FSDP_USE_ORIG_PARAMS": "true",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "true",
    "FSDP_SYNC_MODULE_STATES": "true",
    "FSDP_ACTIVATION_CHECKPOINTING": "false",
    "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD": "false",
}
"""What `accelerate launch --use_fsdp --fsdp_version 2` sets."""


def tensors_of(value, name: str = "") -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint by their paths in it."""
    if isinstance(value, torch.Tensor):
        return {name: value}
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return {path: found for key, part in parts for path, found in tensors_of(part, f"{name}/{key}").items()}


def test_a_head_sharded_over_two_processes_learns_as_in_one(arguments, tmp_path, monkeypatch):
    # What was begun in one process goes on in two, each with a half of the weights and of the optimisers' state.
    alone, together = tmp_path / "alone", tmp_path / "together"
    asked = iter(range(100))
    with monkeypatch.context() as patch:
        patch.setattr(run_module, "_interruptible", lambda note: contextlib.nullcontext(lambda: next(asked) == 5))
        run_here(arguments, together, *SHARED, code=130)
    model, optimizers, position = checkpoints.load(together / "training")
    assert (position.epoch, position.step) == (1, 5)
    # Whatever comes next is the best: the two must write the head.
    checkpoints.save(together / "training", model, optimizers, replace(position, best=-1.0))
    (together / "model.safetensors").unlink()
    shutil.copytree(together, alone)
    processes = start_two(arguments, together, *SHARED, **LAUNCHED_FSDP)
    run_here(arguments, alone, *SHARED)
    said = [process.communicate(timeout=120)[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], said
    assert_same_losses(alone, together)
    # Their checkpoint is what one process writes, and so is the head.
    expected, found = (tensors_of(list(checkpoints.load(out / "training")[:2])) for out in (alone, together))
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-2, atol=1e-4)
    expected, found = (open_tensors(out) for out in (alone, together))
    assert found.stored.keys() == expected.stored.keys()
    for (_, tensor), (_, sharded) in zip(*(head.read(sorted(head.stored)) for head in (expected, found)), strict=True):
        torch.testing.assert_close(sharded, tensor, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"FSDP_VERSION": "1"}, "FSDP in version 1; supported: version 2"),
        (
            {"FSDP_OFFLOAD_PARAMS": "true", "FSDP_AUTO_WRAP_POLICY": "SIZE_BASED_WRAP"},
            "fsdp_auto_wrap_policy SIZE_BASED_WRAP, fsdp_offload_params, which is not supported",
        ),
    ],
)
def test_what_of_fsdp_is_refused(environment, message, monkeypatch):
    from accelerate.utils import DistributedType

    from draftgraph.runtime.errors import ConfigError
    from draftgraph.runtime.train.fsdp_config import check_fsdp_version, take_fsdp

    class Two:
        distributed_type = DistributedType.MULTI_CPU
        state = SimpleNamespace()
        parallelism_config = None

    for name, value in {**LAUNCHED_FSDP, **environment}.items():
        monkeypatch.setenv(name, value)

    def check() -> None:
        check_fsdp_version()
        take_fsdp(Two())

    with pytest.raises(ConfigError, match=message):
        check()


def test_processes_must_share_the_batches_evenly(arguments, tmp_path, monkeypatch):
    from draftgraph.runtime.errors import ConfigError
    from draftgraph.runtime.train import processes

    class Two:
        num_processes = 2
        distributed_type = type("Kind", (), {"value": "MULTI_CPU"})

    monkeypatch.setattr("accelerate.Accelerator", lambda **options: Two())
    with pytest.raises(
        ConfigError, match="--batches-per-step is 3, which 2 processes cannot share evenly: use a multiple"
    ):
        processes.make_accelerator("cpu", 3)
