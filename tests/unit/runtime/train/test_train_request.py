"""What `draftgraph train` refuses before it loads anything, and what it says of memory."""

from __future__ import annotations

import collections
import dataclasses
from pathlib import Path

import pytest

from draftgraph.model_zoo.errors import TrainingConfigError
from draftgraph.model_zoo.training.settings import RATES, TrainingSettings
from draftgraph.runtime.errors import ConfigError, DraftgraphError
from draftgraph.runtime.train.directory import check_directory, check_room, one_run_at_a_time
from draftgraph.runtime.train.memory import MemoryNeed, check_fits
from draftgraph.runtime.train.request import TrainRequest, split_options, with_named

Usage = collections.namedtuple("Usage", "total used free")


@pytest.fixture
def text(tmp_path) -> str:
    file = tmp_path / "text.txt"
    file.write_text("One two three.")
    return str(file)


def request_of(text: str, **changes):
    return TrainRequest(**{"method": "eagle3", "target": "t", "data": (text,), "out": Path("out"), **changes})


def test_options_have_two_ways_in(text):
    named = with_named("dspark", split_options(("markov-rank=8", "decay=2")), num_drafts=3, num_layers=1)
    options = request_of(text, method="dspark", options=named).head_options
    assert (options.num_drafts, options.num_layers, options.markov_rank, options.decay) == (3, 1, 8, 2.0)
    assert request_of(text, method="dspark", options=named).num_drafts == 3


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: split_options(("decay",)), "an option is given as name=value, got 'decay'"),
        (lambda: split_options(("a=1", "a=2")), "option a is given twice"),
        (
            lambda: with_named("eagle3", {}, num_layers=2),
            "--num-layers does not apply to eagle3, whose options are num_dr",
        ),
        (lambda: with_named("dspark", {"num_drafts": "2"}, num_drafts=3), "num_drafts is given twice, by --num-drafts"),
    ],
)
def test_options_that_cannot_be(call, message):
    with pytest.raises(ConfigError, match=message):
        call()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"method": "eagel3"}, "did you mean 'eagle3'"),
        ({"options": {"step_decy": "1"}}, "did you mean 'step_decay'"),
        ({"data": ()}, "no data to train on"),
        ({"data": ("nothing.txt",)}, r"there is no data 'nothing\.txt'"),
        ({"data": ("mtbench",)}, "held out"),
        ({"data": ("self:20",), "regenerate": False}, "must be answered by the target, too"),
        ({"states": "ofline"}, "states must be one of 'online', 'offline', 'hybrid', got 'ofline'"),
        ({"states_dir": Path("x")}, "online keeps none"),
        ({"held_out": 0.0}, "held_out must be"),
        ({"max_length": 1}, "max_length must be at least 2, got 1"),
        ({"draft_vocab_size": 0}, "draft_vocab_size must be at least 1, got 0"),
        ({"target_dtype": "int4"}, "target_dtype must be one of"),
        ({"init_from": Path("nowhere")}, "'nowhere' is no exported head"),
    ],
)
def test_requests_that_cannot_be(text, changes, message):
    with pytest.raises((ConfigError, TrainingConfigError), match=message):
        request_of(text, **changes)


def test_the_draft_vocabulary_is_within_the_targets(text):
    assert request_of(text).vocabulary_size(100) == 100
    assert request_of(text).vocabulary_size(50_000) == 8192
    with pytest.raises(ConfigError, match="must have 1 to 100 tokens, as many as the target has, got 101"):
        request_of(text, draft_vocab_size=101).vocabulary_size(100)


def test_a_directory_that_cannot_take_a_run(tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(ConfigError, match="is a file; a directory is expected"):
        check_directory(file)
    with pytest.raises(ConfigError, match=r"--out '.*file/deep/er' cannot be made: '.*file' is a file"):
        check_directory(file / "deep" / "er")
    for path in ("/proc/nothing/here", "x" * 300):
        with pytest.raises(ConfigError, match=r"--out '.*' cannot be written"):
            check_directory(Path(path))
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"holds config\.json that no training run there made"):
        check_directory(model)
    check_directory(tmp_path / "new" / "deep")
    assert not (tmp_path / "new").exists()


def test_room_for_the_head_and_its_checkpoints(tmp_path, monkeypatch):
    out, learning, parameters = tmp_path / "out" / "deep", 100, 150
    checkpoint, head = 4 * (learning + parameters), 2 * parameters

    def free(size):
        monkeypatch.setattr("draftgraph.runtime.train.directory.shutil.disk_usage", lambda place: Usage(0, 0, size))

    free(2 * checkpoint + head)
    check_room(out, parameters, learning)
    free(2 * checkpoint + head - 1)
    with pytest.raises(ConfigError, match=r"needs 2,300 bytes for the head and its checkpoints, .* 2,299 are free"):
        check_room(out, parameters, learning)
    # What lies there already has its room.
    (out / "training").mkdir(parents=True)
    (out / "training" / "checkpoint.pt").write_bytes(bytes(checkpoint))
    check_room(out, parameters, learning)


def test_two_runs_do_not_share_a_directory(tmp_path):
    first, second = (one_run_at_a_time(tmp_path / "out") for _ in range(2))
    with first, pytest.raises(ConfigError, match="another process is training into"), second:
        pass
    with one_run_at_a_time(tmp_path / "out"):
        pass


def test_what_a_killed_run_was_writing_is_removed(tmp_path):
    state = tmp_path / "training"
    state.mkdir()
    left = [tmp_path / ".model.safetensors.123.part", state / ".checkpoint.pt.4567.part"]
    others = [tmp_path / "notes.part", tmp_path / ".hidden.part", state / "checkpoint.pt"]
    for file in (*left, *others):
        file.write_text("x")
    with one_run_at_a_time(tmp_path):
        assert not any(file.exists() for file in left)
        assert all(file.exists() for file in others)


NEED = MemoryNeed(
    target_parameters=8_000_000_000,
    vocab_size=128_000,
    hidden_size=4096,
    dtype="float32",
    head_parameters=400_000_000,
    draft_vocab_size=32_000,
    num_drafts=4,
    batch_tokens=4096,
)


def test_a_target_that_does_not_fit_says_what_would():
    check_fits(NEED, None, "big")
    check_fits(NEED, NEED.bytes, "big")
    with pytest.raises(
        ConfigError, match=r"'big' in float32 needs about 4\d\.\d GB, and 40\.0 GB are available.*bfloat16"
    ):
        check_fits(NEED, 40_000_000_000, "big")
    smaller = dataclasses.replace(NEED, dtype="bfloat16")
    with pytest.raises(ConfigError, match=r"this would fit: --batch-tokens \d+ \(.*--draft-vocab-size"):
        check_fits(smaller, smaller.bytes - 1_000_000, "big")
    with pytest.raises(ConfigError, match="a smaller target"):
        check_fits(smaller, 1_000_000_000, "big")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0])
@pytest.mark.parametrize("name", ["learning_rate", "clip_norm", "weight_decay", "save_every"])
def test_settings_are_finite(name, value):
    with pytest.raises(ValueError, match=f"{name} must be .*finite.*, got {value}"):
        TrainingSettings(**{name: value})


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_shares_and_temperatures_are_finite(text, value):
    for name in ("held_out", "temperature"):
        with pytest.raises(DraftgraphError, match=f"{name} must be .*, got {value}"):
            request_of(text, **{name: value})


def test_each_optimiser_has_a_rate_that_can_be_used():
    assert TrainingSettings().learning_rate == RATES["muon"] > RATES["adamw"]
    for optimizer, rate in RATES.items():
        assert TrainingSettings(optimizer=optimizer).learning_rate == rate
        assert TrainingSettings(optimizer=optimizer, learning_rate=rate) == TrainingSettings(optimizer=optimizer)
        assert TrainingSettings(optimizer=optimizer, learning_rate=rate).rate(1000, 2000) < rate
