import json
import signal
import subprocess
import sys

import pytest

from draftgraph.runtime import cli, cli_bench, cli_support

from .conftest import NGRAM

COMMON = ("--no-compile", "--dtype", "float32", "--limit", "1", "--repeats", "1", "--max-tokens", "6")
CONFIG = ("--speculative", json.dumps(NGRAM.to_dict()))


@pytest.fixture
def run(monkeypatch, capsys, known_device):
    monkeypatch.setattr(cli_support._Debugging, "on", False)
    monkeypatch.setenv("COLUMNS", "160")

    def call(*arguments):
        monkeypatch.setattr("sys.argv", ["draftgraph", "bench", *map(str, arguments)])
        with pytest.raises(SystemExit) as caught:
            cli.main()
        out, err = capsys.readouterr()
        return caught.value.code, out, err

    return call


def test_tables_and_files(run, tiny_model_path, tmp_path):
    files = ("--json", tmp_path / "bench.json", "--html", tmp_path / "bench.html")
    code, out, err = run(tiny_model_path, *COMMON, *CONFIG, *files)
    assert code == 0
    for word in ("all prompts", "by prompt set", "plain", "output tokens/s", "echo: tokens per round", "yes, all 2"):
        assert word in out
    assert "measuring" in err
    assert f"HTML: {tmp_path / 'bench.html'}" in err
    document = json.loads((tmp_path / "bench.json").read_text())
    assert document["schema"] == "draftgraph-bench"
    assert [method["name"] for method in document["methods"]] == ["plain", "ngram K=4 prompt_lookup_min=1"]
    assert (tmp_path / "bench.html").read_text().startswith("<!doctype html>")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bench.html", "bench.json"]


def test_counting_alone(run, tiny_model_path, tmp_path):
    code, out, _ = run(tiny_model_path, *COMMON, *CONFIG, "--acceptance-only", "--json", tmp_path / "acceptance.json")
    assert code == 0
    for word in ("echo", "chat", "ngram K=4", "tokens per round", "at position 1, 2, ..."):
        assert word in out
    document = json.loads((tmp_path / "acceptance.json").read_text())
    assert document["schema"] == "draftgraph-acceptance"
    assert document["settings"]["timeout"] >= 24 * 3600


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--speculative", "{"), "speculative_config is not JSON"),
        (
            (
                "--speculative",
                '{"method": "ngram", "num_speculative_tokens": 2, "use_local_argmax_reduction": true}',
            ),
            "use_local_argmax_reduction",
        ),
        (("--prompts", "poems"), "there is no prompt set 'poems'"),
        (("--concurrency", "17"), "concurrency must be from 1 to 16, got 17"),
        (("--concurrency", "2", "--arrival-rate", "3"), "exclude each other"),
        (("--peer", "vllm"), "there is no peer 'vllm'"),
        (("--repeats", "0"), "repeats must be at least 1, got 0"),
        (("--temperature", "-1"), "temperature must be"),
        (("--dtype", "int4"), "dtype must be one of"),
        (("--json", "/nowhere/x.json"), "there is no directory '/nowhere'"),
        (("--html", "."), "is a directory"),
        (("--json", "same", "--html", "./same"), "the JSON and the HTML file are the same"),
        (("--acceptance-only", "--peer", "transformers"), "--peer has no meaning beside it"),
        (("--acceptance-only", "--html", "page"), "--html has no meaning beside it"),
        (("--resume", "/no/such/folder/file"), "there is no directory"),
    ],
)
def test_refused_before_anything_is_loaded(run, monkeypatch, tiny_model_path, arguments, message):
    def never():
        raise AssertionError("an engine was loaded")

    monkeypatch.setattr(cli_bench, "engine_class", never)
    code, out, err = run(tiny_model_path, *arguments)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert message in err


def test_an_unknown_model(run):
    code, _, err = run("smolm2-135m")
    assert code == 2
    assert "did you mean 'smollm2-135m'" in err


def test_texts_that_differ_are_a_failure(run, tiny_model_path, monkeypatch):
    from draftgraph.runtime.bench.report import BenchReport

    monkeypatch.setattr(BenchReport, "broken_promises", lambda self: ["ngram"])
    code, out, err = run(tiny_model_path, *COMMON, *CONFIG)
    assert code == 1
    assert "WRONG TEXT: ngram" in out
    assert "error: other text than plain decoding: ngram" in err


def test_a_file_that_fails_at_the_end_does_not_cost_the_rest(run, tiny_model_path, tmp_path, monkeypatch):
    real = cli_bench.write_output_file

    def full(file, text):
        if file.suffix == ".json":
            raise OSError(28, "No space left on device")
        real(file, text)

    monkeypatch.setattr(cli_bench, "write_output_file", full)
    files = ("--json", tmp_path / "bench.json", "--html", tmp_path / "bench.html")
    code, out, err = run(tiny_model_path, *COMMON, *CONFIG, *files)
    assert code == 1
    assert "all prompts" in out
    assert f"error: the JSON file '{tmp_path / 'bench.json'}' could not be written: No space left on device" in err
    assert (tmp_path / "bench.html").read_text().startswith("<!doctype html>")


def test_files_are_there_even_if_nobody_reads_the_tables(run, tiny_model_path, tmp_path, monkeypatch):
    def leave(report, console):
        raise BrokenPipeError

    monkeypatch.setattr("draftgraph.runtime.bench.tables.show", leave)
    monkeypatch.setattr(cli_support.os, "dup2", lambda *_: None)
    monkeypatch.setattr(cli_support.sys.stdout, "fileno", lambda: 1, raising=False)
    code, _, _ = run(tiny_model_path, *COMMON, *CONFIG, "--json", tmp_path / "bench.json")
    assert code == 1
    assert json.loads((tmp_path / "bench.json").read_text())["partial"] is False


def answer_interrupts() -> None:
    """A background shell starts its jobs with SIGINT ignored, and what they start inherits that."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def test_ctrl_c_leaves_a_partial_report(tiny_model_path, tmp_path):
    """A real SIGINT, while the answers are measured."""
    file = tmp_path / "bench.json"
    command = [sys.executable, "-m", "draftgraph", "bench", str(tiny_model_path), *COMMON[:3], *CONFIG]
    command += ["--json", str(file), "--repeats", "100000", "--max-tokens", "40"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, preexec_fn=answer_interrupts) as process:
        assert process.stderr is not None
        lines = []
        for line in process.stderr:
            lines.append(line)
            if line.startswith("measuring\n"):
                break
        process.send_signal(signal.SIGINT)
        try:
            out, err = process.communicate(timeout=60)
        finally:
            process.kill()  # does nothing to one that has ended
    assert process.returncode == 130, "".join(lines) + err
    assert "partial result" in out
    assert "interrupted: the result is partial" in err
    document = json.loads(file.read_text())
    assert document["partial"] is True
    assert len(document["methods"]) == 2
    assert document["methods"][0]["steps"]["rounds"] > 0
