"""`draftgraph train` from end to end on a tiny target, in this process."""

from __future__ import annotations

import json
import random
import re
import shutil
from dataclasses import replace

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from typer.testing import CliRunner

from draftgraph import Engine, SamplingParams
from draftgraph.model_zoo.training import checkpoints
from draftgraph.model_zoo.training.loop import LOG_NAME
from draftgraph.model_zoo.training.shards import ShardStore
from draftgraph.runtime.cli import app

SMALL = (
    *("--target-dtype", "float32", "--no-compile", "--max-tokens", "16", "--max-length", "32", "--num-drafts", "2"),
    *("--batch-tokens", "128", "--learning-rate", "0.01", "--held-out", "0.2", "--intermediate-size", "32"),
)


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    """Prompts of random tokens."""
    draw = random.Random(0)
    file = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    lines = [{"prompt_ids": [draw.randrange(4, 310) for _ in range(draw.randrange(2, 6))]} for _ in range(24)]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


@pytest.fixture(scope="module")
def command(tiny_model_path, prompts):
    """Runs the command; returns its exit code, standard output and standard error."""

    def call(out, *options, method="eagle3", data=prompts):
        arguments = ["train", method, "--target", str(tiny_model_path), "--data", str(data), "--out", str(out)]
        result = CliRunner().invoke(app, [*arguments, *SMALL, *options])
        return result.exit_code, result.stdout, result.stderr

    return call


@pytest.fixture(scope="module")
def trained(command, tmp_path_factory):
    """A run to the end."""
    out = tmp_path_factory.mktemp("trained") / "head"
    code, stdout, stderr = command(out, "--epochs", "2", "--json", str(out.parent / "report.json"))
    assert code == 0, stderr
    return out, stdout, stderr


def test_a_run_tells_what_came_of_it(trained, tiny_model_path):
    out, stdout, stderr = trained
    assert "24 used" in stderr
    assert "answers: 24, " in stderr
    assert re.search(r"update \d+ of \d+: loss .*accepted .*held out .* per round, \d+ tokens/s, 0:00 left", stderr)
    assert re.search(r"draft 1 .*%.*\n.*drafts 1 to 2 .*%", stdout)
    assert "peak memory" in stdout
    report = json.loads((out.parent / "report.json").read_text())
    assert report["reason"] == "finished"
    assert report["steps"] == sum("loss" in line for line in log_of(out))
    assert report["parameters"] > 1000
    assert report["peak_bytes"] > 1e8
    spec = json.loads(re.search(r"--speculative-config '(.*)'", stdout)[1])
    with Engine.from_pretrained(tiny_model_path, spec, dtype="float32", compile=False, max_model_len=64) as engine:
        assert engine.generate([5, 6, 7], SamplingParams(max_tokens=4, ignore_eos=True)).metrics.proposed_tokens


def log_of(out):
    return [json.loads(line) for line in (out / "training" / LOG_NAME).read_text().splitlines()]


def test_a_run_that_has_ended_does_nothing(trained, command):
    out, stdout, _ = trained
    names = ("config.json", "model.safetensors", "training/checkpoint.pt", "training/log.jsonl", "training/result.json")
    before = [(out / name).stat().st_mtime_ns for name in names]
    code, again, stderr = command(out, "--epochs", "2")
    assert code == 0
    assert "this run has ended already: nothing was done" in stderr
    assert again == stdout
    assert before == [(out / name).stat().st_mtime_ns for name in names]


def test_another_run_is_refused_with_every_difference(trained, command):
    code, _, stderr = command(trained[0], "--epochs", "3", "--option", "step_decay=0.5")
    assert code == 2
    assert "--epochs was 2 and is 3; --option step_decay was 0.8 and is 0.5" in stderr
    code, _, stderr = command(
        trained[0], "--epochs", "2", "--dtype", "bfloat16", "--option", "anchors=8", method="dflash"
    )
    assert code == 2
    assert "--dtype was float32 and is bfloat16; the method was eagle3 and is dflash" in stderr
    assert "--option anchors is 8, and the run had no such option" in stderr
    code, _, stderr = command(trained[0], "--epochs", "2", "--max-tokens", "12")
    assert code == 2
    assert "max_tokens is 16 there and 12 now" in stderr


def test_data_that_changed_is_refused_before_the_target_answers(command, trained, prompts, tmp_path):
    answers = trained[0] / "training" / "data-0" / "answers.jsonl"
    before, more = answers.read_bytes(), tmp_path / "more.jsonl"
    more.write_text(prompts.read_text() + '{"prompt_ids": [7, 8, 9]}\n')
    code, _, stderr = command(trained[0], "--epochs", "2", data=more)
    assert code == 2
    assert "what --data names is another, or its content has changed" in stderr
    assert answers.read_bytes() == before
    # Another name for the same is the same.
    more.write_bytes(prompts.read_bytes())
    code, _, stderr = command(trained[0], "--epochs", "2", data=more)
    assert (code, "has ended already" in stderr) == (0, True)


def test_a_log_that_was_lost(command, trained, tmp_path):
    out = tmp_path / "head"
    shutil.copytree(trained[0], out)
    (out / "training" / "result.json").unlink()
    (out / "training" / LOG_NAME).write_text("")
    model, optimizers, position = checkpoints.load(out / "training")
    checkpoints.save(out / "training", model, optimizers, replace(position, epoch=1))
    code, stdout, stderr = command(out, "--epochs", "2", "--json", str(tmp_path / "report.json"))
    assert code == 0, stderr
    assert re.search(r"tokens per round .* unknown ", stdout)
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["before"] is report["acceptance_length_before"] is None
    code, again, _ = command(out, "--epochs", "2")
    assert (code, again) == (0, stdout)


def test_a_damaged_checkpoint_is_told_before_the_target_answers(command, trained, tmp_path):
    out = tmp_path / "head"
    shutil.copytree(trained[0], out)
    file = out / "training" / "checkpoint.pt"
    file.write_bytes(file.read_bytes()[:-100])
    shutil.rmtree(out / "training" / "data-0")
    code, _, stderr = command(out, "--epochs", "2")
    assert code == 2
    assert re.search(r"checkpoint\.pt is damaged \(.*\): remove it to begin anew", stderr)
    assert not (out / "training" / "data-0").exists()


def test_room_for_all_hidden_states_is_asked_for_before_any_is_computed(command, trained, tmp_path, monkeypatch):
    answers = trained[0] / "training" / "data-0" / "answers.jsonl"
    options = ("--no-regenerate", "--epochs", "1", "--states", "offline", "--states-dir", str(tmp_path / "states"))

    def needed(free):
        with monkeypatch.context() as patch:
            patch.setattr(ShardStore, "_free", lambda store: free)
            code, _, stderr = command(tmp_path / "out", *options, data=answers)
        found = re.search(r"the hidden states need (\d+) bytes", stderr)
        assert code == (2 if found else 0), stderr
        return int(found[1]) if found else None

    need = needed(0)
    assert needed(need - 1) == need
    assert not list((tmp_path / "states").rglob("*.safetensors"))
    assert needed(need) is None


def test_what_ctrl_c_finds_computed_is_kept(command, trained, tmp_path, monkeypatch):
    answers = trained[0] / "training" / "data-0" / "answers.jsonl"
    options = ("--no-regenerate", "--epochs", "1", "--states", "offline", "--states-dir", str(tmp_path / "states"))
    add, added = ShardStore.add, []

    def press(store, index, *parts):
        if len(added) == 5:
            raise KeyboardInterrupt
        added.append(index)
        add(store, index, *parts)

    with monkeypatch.context() as patch:
        patch.setattr(ShardStore, "add", press)
        code, _, stderr = command(tmp_path / "out", *options, data=answers)
    assert code == 130
    assert "goes on from what is kept" in stderr
    (shard,) = (tmp_path / "states").rglob("states-*.safetensors")
    with safe_open(shard, framework="pt") as kept:
        assert {int(name.partition(".")[2]) for name in kept.keys()} == set(added)  # noqa: SIM118, not a mapping


@pytest.mark.parametrize("content", ["[]", "{", '{"called": 3}', "[" * 100_000])
def test_a_note_of_the_run_that_is_damaged(command, tmp_path, content):
    state = tmp_path / "out" / "training"
    state.mkdir(parents=True)
    (state / "run.json").write_text(content)
    code, _, stderr = command(tmp_path / "out")
    assert code == 2
    assert re.search(r"error: .*run\.json is damaged \(.*\): remove .*training to begin anew", stderr)


def test_a_dry_run_writes_nothing(command, tmp_path):
    code, stdout, stderr = command(tmp_path / "out", "--dry-run", "--json", str(tmp_path / "dry.json"), method="dspark")
    assert code == 0, stderr
    for part in (
        "parameters:",
        "exported head:",
        "on disk",
        "peak memory",
        "tokens per epoch",
        "updates",
        "time to tr",
    ):
        assert part in stdout
    assert "24 prompts are not answered yet" in stdout
    assert not (tmp_path / "out").exists()
    found = json.loads((tmp_path / "dry.json").read_text())
    assert found["trainable_parameters"] < found["parameters"]
    assert found["seconds"] > 0


def test_hidden_states_are_kept_and_shared(command, trained, tmp_path):
    answers = trained[0] / "training" / "data-0" / "answers.jsonl"
    shared = ("--no-regenerate", "--states-dir", str(tmp_path / "states"), "--epochs", "1")
    for method, states in (("eagle3", "offline"), ("dflash", "hybrid")):
        code, _, stderr = command(tmp_path / method, "--states", states, *shared, method=method, data=answers)
        assert code == 0, stderr
    # One store of what is trained on and one of what is held out, filled once.
    stores = sorted((tmp_path / "states").iterdir())
    assert len(stores) == 2
    assert all(len(list(store.glob("states-*.safetensors"))) == 1 for store in stores)


def test_a_run_begins_at_another_head(command, trained, tmp_path):
    answers = trained[0] / "training" / "data-0" / "answers.jsonl"
    options = ("--no-regenerate", "--epochs", "1", "--learn-prompts", "--init-from", str(trained[0]))
    code, _, stderr = command(tmp_path / "head", *options, data=answers)
    assert code == 0, stderr
    assert re.search(r"begins at another head's fc\.weight, .*layers\.0\.self_attn\.q_proj\.weight", stderr)
    assert "as usual begin" not in stderr
    first = next(entry for entry in log_of(tmp_path / "head") if "held_out_loss" in entry)
    before = json.loads((trained[0].parent / "report.json").read_text())
    # Rounded to bfloat16 when it was exported.
    assert first["held_out_length"] == pytest.approx(before["acceptance_length_after"], abs=0.1)


def test_a_head_to_begin_with_is_looked_at_before_the_target_answers(command, trained, tmp_path):
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "config.json").write_text('{"model_type": "llama", "architectures": ["LlamaForCausalLM"]}')
    save_file({"fc.weight": torch.zeros(2, 2)}, foreign / "model.safetensors")
    for directory, message in ((trained[0], "nothing of the head in"), (foreign, "is no head to begin with")):
        code, _, stderr = command(tmp_path / "out", "--init-from", str(directory), method="medusa")
        assert code == 2
        assert message in stderr
        assert not (tmp_path / "out" / "training" / "data-0").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--option", "aux_layers=99"), "aux_layers must be hidden states 0 to"),
        (("--draft-vocab-size", "9999"), "the draft vocabulary must have 1 to"),
        (("--option", "stepdecay=1"), "did you mean 'step_decay'"),
        (("--learning-rate", "-1"), "learning_rate must be positive and finite, got -1"),
        (("--dtype", "int8"), "dtype must be float32 or bfloat16, got 'int8'"),
        (("--option", "aux_layers="), "option aux_layers of eagle3 must be integers with commas between or none"),
        (("--no-regenerate",), "there is a prompt and no answer"),
        (("--init-from", "eagle3@gpt"), "no draft head 'eagle3@gpt' comes with draftgraph; there are heads for"),
        (("--init-from", "x" * 300), "File name too long"),
    ],
)
def test_bad_input_is_refused(command, tmp_path, options, message):
    code, _, stderr = command(tmp_path / "out", *options)
    assert code == 2
    assert message in stderr
    assert "Traceback" not in stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--max-length", "999999"), r"--max-length is 999999, but '.*' was made for at most \d+ tokens"),
        (
            ("--option", "aux_layers=[1,0,1]"),
            r"aux_layers must be hidden states that are all different, got \[1, 0, 1\]",
        ),
        (
            ("--states", "offline", "--states-dir", __file__),
            r"--states-dir '.*\.py' is a file; a directory is expected",
        ),
        (
            ("--states", "hybrid", "--states-dir", f"{__file__}/x", "--dry-run"),
            r"--states-dir '.*\.py/x' cannot be made: '.*\.py' is a file",
        ),
    ],
)
def test_what_does_not_fit_the_target_is_refused_before_it_answers(command, tmp_path, options, message):
    code, _, stderr = command(tmp_path / "out", *options)
    assert code == 2
    assert re.search(message, stderr)
    assert not (tmp_path / "out" / "training" / "data-0").exists()


def test_a_target_that_does_not_fit_is_refused(command, tmp_path, monkeypatch):
    monkeypatch.setattr("draftgraph.runtime.train.preparation.available_bytes", lambda device: 900_000)
    code, _, stderr = command(tmp_path / "out")
    assert code == 2
    assert "in float32 needs about" in stderr
    assert "0.9 MB are available" in stderr
    assert not (tmp_path / "out" / "training" / "data-0").exists()


def test_a_draft_vocabulary_that_is_too_small_is_told(command, trained, tmp_path):
    answers = trained[0] / "training" / "data-0" / "answers.jsonl"
    options = ("--no-regenerate", "--dry-run", "--draft-vocab-size")
    code, _, stderr = command(tmp_path / "out", *options, "5", data=answers)
    assert code == 0, stderr
    found = re.search(
        r"can draft ([\d.]+)% of what the target wrote, which is little: --draft-vocab-size (\d+) would be 90%", stderr
    )
    assert 0 < float(found[1]) < 50
    code, _, stderr = command(tmp_path / "out", *options, found[2], data=answers)
    assert re.search(r"can draft 9\d\.\d% of what the target wrote\n", stderr)
    # The only token is one that ends an answer, and no answer has it.
    lines = [{"prompt_ids": [n, 5], "token_ids": [6, 7 + n % 2], "finish": "length"} for n in range(10, 20)]
    (tmp_path / "answers.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    code, _, stderr = command(tmp_path / "out", *options, "1", data=tmp_path / "answers.jsonl")
    assert code == 2
    assert "with --draft-vocab-size 1 the head could draft nothing of what the target wrote; 4 tokens" in stderr


def test_data_without_text_is_refused(command, tmp_path):
    (tmp_path / "empty.txt").write_text(" \n")
    code, _, stderr = command(tmp_path / "out", data=tmp_path / "empty.txt")
    assert code == 2
    assert "holds no usable text" in stderr


def test_the_options_of_a_method_can_be_listed(command, tmp_path):
    code, stdout, _ = command(tmp_path / "out", "--option", "help")
    assert code == 0
    assert re.search(r"step_decay=0\.8 +The loss of each step", stdout)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("arguments", [("eagle3", "--option", "help"), ("--option", "help", "eagle3")])
def test_the_options_are_listed_without_the_rest_of_a_command(arguments):
    result = CliRunner().invoke(app, ["train", *arguments])
    assert result.exit_code == 0, result.stderr
    assert "step_decay=0.8" in result.stdout
    wrong = CliRunner().invoke(app, ["train", *(part.replace("eagle3", "eagel3") for part in arguments)])
    assert wrong.exit_code == 2
    assert "error: no head of method 'eagel3' can be trained (did you mean 'eagle3'?)" in wrong.stderr
    assert "Missing option" in CliRunner().invoke(app, ["train", "eagle3", "--option", "step_decay=1"]).stderr
