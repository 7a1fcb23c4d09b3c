"""The training loop by itself, with a head of one matrix."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import resource
import stat
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file

from draftgraph.model_zoo.errors import CheckpointError
from draftgraph.model_zoo.training import checkpoints
from draftgraph.model_zoo.training.batch import TrainingBatch
from draftgraph.model_zoo.training.loop import LOG_NAME, Acceptance, TrainingError, evaluate, train
from draftgraph.model_zoo.training.settings import TrainingSettings
from draftgraph.model_zoo.training.trainee import Outcome, Trainee

SIZE = 16
SETTINGS = TrainingSettings(
    epochs=3, batch_tokens=24, batches_per_step=2, learning_rate=0.05, warmup_steps=3, patience=20, save_every=1e9
)


class OneMatrix(Trainee):
    """Predicts the target's last state from another one; "accepts" where it is near."""

    method = "matrix"
    num_drafts = 2

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.matrix = torch.nn.Linear(SIZE, SIZE)

    def states_of(self, num_layers):
        return (0,)

    def forward(self, batch, generator):
        noise = 1.0 + 0.1 * torch.rand((), generator=generator)
        error = ((self.matrix(batch.states) - batch.final) ** 2).mean(-1)[batch.valid] * noise
        near = torch.stack([(error < bound).sum() for bound in (0.5, 0.2)]).float()
        return Outcome(error.mean(), near, torch.full((2,), float(len(error))))

    def config_json(self):
        return {}


class Texts:
    def __init__(self, count, broken_after=None):
        self.lengths = [4 + number % 5 for number in range(count)]
        self.asked, self.broken_after = 0, broken_after

    def batch(self, indices):
        self.asked += 1
        length = max(self.lengths[index] for index in indices)
        states = torch.stack(
            [torch.randn(length, SIZE, generator=torch.Generator().manual_seed(index)) for index in indices]
        )
        valid = torch.stack([torch.arange(length) < self.lengths[index] for index in indices])
        final = states.flip(-1)
        if self.broken_after is not None and self.asked > self.broken_after:
            final = final * float("nan")
        return TrainingBatch(torch.zeros(valid.shape, dtype=torch.int64), valid, valid, states, final)


def go(directory: Path, settings=SETTINGS, texts=None, **options):
    return train(
        OneMatrix(), texts or Texts(40), Texts(6), settings, directory, accelerator=Accelerator(cpu=True), **options
    )


def log_of(directory: Path):
    lines = (directory / "training" / LOG_NAME).read_text().splitlines()
    return [{key: value for key, value in json.loads(line).items() if key != "seconds"} for line in lines]


def weights_of(directory: Path):
    model, optimizers, position = checkpoints.load(directory / "training")
    return model, optimizers, dataclasses.replace(position, seconds=0.0)


def test_a_run_that_was_stopped_goes_on_to_the_same_weights(tmp_path):
    whole = go(tmp_path / "whole")
    assert whole.reason == "finished"
    for _ in range(30):
        updates = []
        ended = go(tmp_path / "parts", watch=updates.append, stop=lambda updates=updates: len(updates) >= 4)
        if ended.reason == "finished":
            break
        assert ended.reason == "stopped"
        assert len(updates) == 4
    assert ended.position.step == whole.position.step > 12
    one, two = weights_of(tmp_path / "whole"), weights_of(tmp_path / "parts")
    assert all(torch.equal(one[0][name], two[0][name]) for name in one[0])
    assert one[2] == two[2]
    assert ended.held_out == whole.held_out
    assert log_of(tmp_path / "whole") == log_of(tmp_path / "parts")
    heads = [load_file(tmp_path / name / "model.safetensors") for name in ("whole", "parts")]
    assert all(torch.equal(heads[0][name], heads[1][name]) for name in heads[0])


def test_learning_is_seen_on_the_held_out_texts(tmp_path):
    settings = dataclasses.replace(SETTINGS, epochs=8)
    before = evaluate(OneMatrix(), Texts(6), settings)
    ended = go(tmp_path, settings)
    assert ended.held_out.length > before.length + 0.5
    assert ended.held_out.loss < before.loss / 2


def test_a_run_that_gave_up_does_not_go_on(tmp_path):
    settings = dataclasses.replace(SETTINGS, evaluate_every=1, patience=2, learning_rate=1e-9)
    first = go(tmp_path, settings)
    assert first.reason == "no better"
    seen = []
    again = go(tmp_path, settings, watch=seen.append)
    assert again.reason == "no better"
    assert again.position.step == first.position.step == settings.warmup_steps + 2
    assert not seen


def test_a_run_that_came_to_its_end_finished_even_if_it_had_got_no_better(tmp_path):
    settings = dataclasses.replace(SETTINGS, epochs=2, warmup_steps=1, patience=2, learning_rate=1e-9)
    ended = go(tmp_path, settings)
    assert ended.position.stale == 2
    assert ended.reason == "finished"


def test_where_as_much_is_accepted_the_loss_decides():
    few, fewer = Acceptance(2.0, (0.5, 0.1)), Acceptance(1.0, (0.4, 0.1))
    assert few.rank > fewer.rank
    assert Acceptance(1.9, (0.5, 0.1)).rank > few.rank


class NeverNear(OneMatrix):
    """Learns, but is not near enough yet for anything to be accepted."""

    def forward(self, batch, generator):
        outcome = super().forward(batch, generator)
        return dataclasses.replace(outcome, accepted=torch.zeros(2))


def test_a_head_that_accepts_nothing_yet_is_kept_once_its_loss_is_lower(tmp_path):
    before = evaluate(NeverNear(), Texts(6), SETTINGS)
    begun = NeverNear().matrix.weight
    ended = train(NeverNear(), Texts(40), Texts(6), SETTINGS, tmp_path, accelerator=Accelerator(cpu=True))
    assert ended.position.best_loss == ended.held_out.loss < before.loss
    assert not torch.equal(load_file(tmp_path / "model.safetensors")["matrix.weight"], begun)


def test_a_loss_that_is_not_finite_keeps_the_last_checkpoint_and_the_best_head(tmp_path):
    settings = dataclasses.replace(SETTINGS, save_every=0.0)
    with pytest.raises(TrainingError, match=r"the loss of update 6 is nan.*best head so far stay.*learning rate below"):
        go(tmp_path, settings, Texts(40, broken_after=10))
    model, _, position = checkpoints.load(tmp_path / "training")
    assert position.step == 4, "of the last weights whose loss was finite"
    assert all(bool(tensor.isfinite().all()) for tensor in model.values())
    assert all(bool(tensor.isfinite().all()) for tensor in load_file(tmp_path / "model.safetensors").values())
    # And the run goes on from there.
    assert go(tmp_path, settings).reason == "finished"


def test_weights_that_lead_nowhere_are_not_saved(tmp_path):
    settings = dataclasses.replace(SETTINGS, save_every=0.0, learning_rate=1e30, warmup_steps=1, optimizer="adamw")
    with pytest.raises(TrainingError, match=r"is (nan|inf): training stops.*; a learning rate below 1e\+30 may help"):
        go(tmp_path, settings)
    model, _, position = checkpoints.load(tmp_path / "training")
    assert all(float(tensor.abs().max()) < 1e3 for tensor in model.values())
    assert position.step == 0


def test_what_stays_is_not_promised_where_nothing_was(tmp_path):
    settings = dataclasses.replace(SETTINGS, learning_rate=1e30, warmup_steps=1, optimizer="adamw")
    with pytest.raises(TrainingError, match=r"training stops\. The best head so far stays in"):
        go(tmp_path, settings)
    assert checkpoints.load(tmp_path / "training") is None


def test_a_log_that_cannot_be_written_says_what_stays(tmp_path, monkeypatch):
    def full(log, entry):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("draftgraph.model_zoo.training.loop._Log.write", full)
    with pytest.raises(TrainingError, match=r"the log of update 0 could not be written .*No space left on device"):
        go(tmp_path)


def test_what_a_kill_leaves_half_written_is_not_read(tmp_path):
    go(tmp_path, stop=lambda: True)
    log = tmp_path / "training" / LOG_NAME
    log.write_text(log.read_text() + '{"step": 2, "lo')
    (tmp_path / "training" / ".checkpoint.pt.1.part").write_bytes(b"half")
    assert go(tmp_path).reason == "finished"
    assert [entry["step"] for entry in log_of(tmp_path) if "loss" in entry][:3] == [1, 2, 3]


def test_a_damaged_checkpoint_is_named(tmp_path):
    go(tmp_path, stop=lambda: True)
    (tmp_path / "training" / "checkpoint.pt").write_bytes(b"PK\x03\x04 nothing")
    with pytest.raises(CheckpointError, match=r"checkpoint\.pt is damaged"):
        go(tmp_path)


def test_a_byte_that_changed_is_seen(tmp_path):
    go(tmp_path, stop=lambda: True)
    file = checkpoints.file_in(tmp_path / "training")
    checkpoints.check(tmp_path / "training")
    content = bytearray(file.read_bytes())
    weights = checkpoints.load(tmp_path / "training")[0]["matrix.weight"].numpy().tobytes()
    content[content.index(weights) + 5] ^= 0xFF
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"is damaged \(.*has another checksum\): remove it to begin anew"):
        go(tmp_path)


@pytest.mark.parametrize(("room", "what"), [(300, "head of update 0"), (2000, "checkpoint of update 0")])
def test_a_full_disk_is_told_as_such(tmp_path, room, what):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, limits[1]))
    try:
        with pytest.raises(
            TrainingError,
            match=rf"the {what} could not be written to '.*': File too large: it needs \d+ bytes, and \d+ are free",
        ):
            go(tmp_path, stop=lambda: True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not list(tmp_path.rglob("*.part"))
    assert go(tmp_path).reason == "finished"


def test_what_is_written_can_be_read_by_whom_the_umask_lets(tmp_path):
    mask = os.umask(0o022)
    try:
        go(tmp_path, stop=lambda: True)
    finally:
        os.umask(mask)
    files = [file for file in tmp_path.rglob("*") if file.is_file()]
    assert {file.name for file in files} == {"config.json", "model.safetensors", "checkpoint.pt", LOG_NAME}
    assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o644}


def test_another_run_is_told_apart(tmp_path):
    checkpoints.check_identity(tmp_path, {"epochs": 1, "options": [1, 2]})
    checkpoints.check_identity(tmp_path, {"epochs": 1}, partly=True)
    with pytest.raises(CheckpointError, match=r"epochs was 1 and is 2; options was \[1, 2\] and is \[3\]"):
        checkpoints.check_identity(tmp_path, {"epochs": 2, "options": (3,)})
    # What the user called a value is told, and makes no difference.
    checkpoints.check_identity(tmp_path, {"epochs": 1, "options": [1, 2]}, names={"options": "those"})
    checkpoints.check_identity(tmp_path / "named", {"epochs": 1}, names={"epochs": "one"})
    with pytest.raises(CheckpointError, match="another kind: one, two; ask for"):
        checkpoints.check_identity(
            tmp_path / "named", {"epochs": 2}, names={"epochs": "two"}, describe=lambda found: ", ".join(found.names)
        )
    checkpoints.check_identity(tmp_path / "new", {"epochs": 1}, partly=True)
    assert not (tmp_path / "new").exists()
