import errno
import io
import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pytest

from draftgraph.runtime import cli, cli_demo, cli_fetch, cli_generate, cli_support, doctor, shipped_heads
from draftgraph.runtime.errors import FetchError, RequestError
from draftgraph.runtime.outputs import GenerationResult, RequestMetrics, StreamChunk
from draftgraph.runtime.sampling_params import SamplingParams

NGRAM = '{"method": "ngram", "num_speculative_tokens": 8}'
WORDS = ["To", " be", ", or", " not"]


def metrics(rounds, seconds):
    return RequestMetrics.from_histogram(
        [[rounds, 0], [0, 0]],
        prompt_tokens=3,
        output_tokens=4,
        submitted=0.0,
        token_times=[1.0, 1.0, 1.0, 1.0 + seconds],
    )


class FakeStream:
    def __init__(self, engine, params):
        self.chunks = self.make(engine, params)
        self.engine = engine

    def make(self, engine, params):
        for index in range(params.n):
            for position, word in enumerate(WORDS):
                if position == engine.interrupt_at and not engine.cancelled:
                    raise KeyboardInterrupt
                last = position == len(WORDS) - 1
                yield StreamChunk(
                    text=word,
                    token_ids=(position,),
                    index=index,
                    finish_reason=engine.finish_reason if last else None,
                    result=self.result(engine, index) if last else None,
                )

    def result(self, engine, index):
        return GenerationResult(
            text="".join(WORDS),
            token_ids=engine.token_ids,
            finish_reason=engine.finish_reason,
            error="not finite" if engine.finish_reason == "error" else None,
            metrics=engine.metrics,
            index=index,
        )

    def __iter__(self):
        return self.chunks

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.engine.closed_streams += 1

    def cancel(self):
        self.engine.cancelled = True

    def close(self):
        self.engine.checked = True


class FakeEngine:
    made: ClassVar = []
    error = None

    def __init__(self, model, speculation, options):
        self.model, self.speculation, self.options = model, speculation, options
        self.model_path = Path(model)
        self.config = SimpleNamespace(speculative=SimpleNamespace(num_speculative_tokens=5))
        self.tokenizer = SimpleNamespace(chat_template="a template")
        self.token_ids = (0, 1, 2, 3)
        self.finish_reason = "stop"
        self.metrics = metrics(4, 2.0) if speculation is None else metrics(2, 0.5)
        self.interrupt_at = None
        self.cancelled = self.closed = self.warm = False
        self.closed_streams = 0
        self.checked = False
        self.refusal = None

    @classmethod
    def from_pretrained(cls, model, speculative_config=None, **options):
        print("a library prints to standard output")
        if cls.error is not None:
            raise cls.error
        engine = cls(model, speculative_config, options)
        cls.configure(engine)
        cls.made.append(engine)
        return engine

    @classmethod
    def configure(cls, engine):
        pass

    def warmup(self, progress=None):
        assert self.refusal is None
        progress(0, 2, "layer")
        progress(2, 2, "done")
        self.warm = True

    def stream(self, prompt, params=None):
        if self.refusal is not None:
            raise self.refusal
        self.prompt, self.params = prompt, params
        return FakeStream(self, params)

    def close(self):
        self.closed = True

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.close()


@pytest.fixture
def engine(monkeypatch, tmp_path):
    """The class of the engine in place; each test gets its own."""
    fake = type("Engine", (FakeEngine,), {"made": [], "error": None})
    for module in (cli_generate, cli_demo):
        monkeypatch.setattr(module, "engine_class", lambda: fake)
    monkeypatch.setattr(cli_demo, "resolve_model", Path)
    monkeypatch.setattr(shipped_heads, "HEADS_DIRECTORY", tmp_path / "heads")
    monkeypatch.setattr(cli_support._Debugging, "on", False)
    monkeypatch.setenv("DRAFTGRAPH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "200")
    return fake


@pytest.fixture
def run(monkeypatch, capsys):
    def call(*arguments):
        monkeypatch.setattr("sys.argv", ["draftgraph", *arguments])
        with pytest.raises(SystemExit) as caught:
            cli.main()
        out, err = capsys.readouterr()
        return caught.value.code, out, err

    return call


class TestHelp:
    @pytest.mark.parametrize(
        ("command", "mentions"),
        [
            ((), ("demo", "generate", "profile", "fetch", "inspect", "doctor")),
            (("demo",), ("--model", "--method", "--max-tokens", "--num-speculative-tokens")),
            (("fetch",), ("smollm2-135m",)),
            (("doctor",), ("--json",)),
            (("profile",), ("--prompt", "--trace", "--json", "--measure", "--speculative-config")),
            (("generate",), ("--speculative-config", "--temperature", "--top-k", "--min-p", "--exact", "--json")),
            (("generate",), ("--chat", "--system", "--dtype", "--device", "--max-model-len", "--no-compile")),
        ],
    )
    def test_each_command(self, run, monkeypatch, command, mentions):
        monkeypatch.setenv("COLUMNS", "200")
        monkeypatch.setenv("NO_COLOR", "1")
        code, out, _ = run(*command, "--help")
        assert code == 0
        plain = re.sub(r"\x1b\[[0-9;]*m", "", out)
        for word in mentions:
            assert word in plain

    def test_generate_offers_every_sampling_parameter(self, run, monkeypatch):
        monkeypatch.setenv("COLUMNS", "200")
        _, out, _ = run("generate", "--help")
        plain = re.sub(r"\x1b\[[0-9;]*m", "", out)
        for name in SamplingParams.__dataclass_fields__:
            assert f"--{name.replace('_', '-')}".removesuffix("s") in plain

    def test_version(self, run):
        code, out, _ = run("--version")
        assert code == 0
        assert out.startswith("draftgraph ")

    def test_an_unknown_command(self, run):
        code, _, err = run("demolish")
        assert code == 2
        assert "demolish" in err


class TestGenerate:
    def test_streams_the_text(self, run, engine):
        code, out, _ = run("generate", "some/model", "hello")
        assert code == 0
        assert out.endswith("To be, or not\n")
        (made,) = engine.made
        assert made.model == "some/model"
        assert made.prompt == [{"role": "user", "content": "hello"}]
        assert made.params == SamplingParams()
        assert made.closed
        assert made.closed_streams == 1
        assert made.checked
        assert made.warm

    def test_options_reach_the_engine(self, run, engine):
        code, _, _ = run(
            *("generate", "m", "hello", "--speculative-config", NGRAM, "--temperature", "0.7", "--top-k", "5"),
            *("--top-p", "0.9", "--min-p", "0.1", "--seed", "-3", "--max-tokens", "9", "--stop", "a", "--stop", "b"),
            *("--stop-token-id", "4", "--ignore-eos", "--logprobs", "2", "--dtype", "float32", "--device", "cpu"),
            *("--max-model-len", "99", "--exact", "--no-compile", "--executor", "host"),
        )
        assert code == 0
        (made,) = engine.made
        assert made.params == SamplingParams(
            temperature=0.7,
            top_k=5,
            top_p=0.9,
            min_p=0.1,
            seed=-3,
            max_tokens=9,
            stop=("a", "b"),
            stop_token_ids=(4,),
            ignore_eos=True,
            logprobs=2,
        )
        assert made.speculation.method == "ngram"
        expected = {"dtype": "float32", "device": "cpu", "max_model_len": 99, "exact": True, "compile": False}
        assert made.options.items() >= {**expected, "executor": "host"}.items()

    def test_json_is_the_only_output(self, run, engine):
        code, out, err = run("generate", "m", "hello", "--json", "--speculative-config", NGRAM)
        assert code == 0
        document = json.loads(out)
        assert document["text"] == "To be, or not"
        assert document["token_ids"] == [0, 1, 2, 3]
        assert document["finish_reason"] == "stop"
        assert document["metrics"]["rounds"] == 2
        assert document["timings"].keys() == {"load_seconds", "generate_seconds"}
        assert document["speculative_config"]["num_speculative_tokens"] == 8
        assert document["model"] == "m"
        assert "a library prints" in err

    def test_several_answers(self, run, engine):
        _, out, _ = run("generate", "m", "hello", "-n", "2")
        assert "--- answer 1 of 2\nTo be, or not\n--- answer 2 of 2\nTo be, or not\n" in out
        _, out, _ = run("generate", "m", "hello", "-n", "2", "--json")
        assert [answer["index"] for answer in json.loads(out)["answers"]] == [0, 1]

    def test_the_prompt_from_standard_input(self, run, engine, monkeypatch):
        monkeypatch.setattr("sys.stdin", io.StringIO("from a pipe"))
        assert run("generate", "m", "-", "--no-chat")[0] == 0
        assert engine.made[0].prompt == "from a pipe"

    def test_chat(self, run, engine):
        run("generate", "m", "hello", "--system", "be brief")
        assert [message["role"] for message in engine.made[-1].prompt] == ["system", "user"]
        engine.configure = lambda made: setattr(made.tokenizer, "chat_template", None)
        run("generate", "m", "hello")
        assert engine.made[-1].prompt == "hello"
        run("generate", "m", "hello", "--chat")
        assert engine.made[-1].prompt == [{"role": "user", "content": "hello"}]

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (("",), "the prompt is empty"),
            (("x", "--temperature", "-1"), "temperature must be in [0, 100000], got -1.0"),
            (("x", "--top-p", "0"), "top_p must be in (0, 1], got 0.0"),
            (("x", "--speculative-config", "{"), "speculative_config is not JSON"),
            (
                (
                    "x",
                    "--speculative-config",
                    '{"method": "ngram", "num_speculative_tokens": 2, "use_local_argmax_reduction": true}',
                ),
                "use_local_argmax_reduction is not available",
            ),
            (("x", "--no-chat", "--system", "y"), "--system needs the chat template"),
        ],
    )
    def test_errors_come_before_the_model_is_loaded(self, run, engine, arguments, message):
        code, out, err = run("generate", "m", *arguments)
        assert code == 2
        assert out == ""
        assert err.startswith("error: ")
        assert message in err
        assert err.count("\n") == 1
        assert engine.made == []

    def test_errors_of_the_engine(self, run, engine):
        engine.error = RequestError("the prompt has 9 tokens\nand 8 are accepted")
        code, _, err = run("generate", "m", "x")
        assert (code, err) == (2, "error: the prompt has 9 tokens and 8 are accepted\n")

    def test_a_request_is_refused_before_compiling(self, run, engine):
        engine.configure = lambda made: setattr(made, "refusal", RequestError("the prompt is too long"))
        code, _, err = run("generate", "m", "x")
        assert (code, err) == (2, "error: the prompt is too long\n")
        assert not engine.made[0].warm
        assert engine.made[0].closed

    def test_a_defect_is_told_apart(self, run, engine):
        engine.error = ZeroDivisionError("division by zero")
        code, _, err = run("generate", "m", "x")
        assert code == 1
        assert err == "internal error: ZeroDivisionError: division by zero (--debug shows the traceback)\n"

    def test_a_file_that_cannot_be_used_is_no_defect(self, run, engine):
        engine.error = OSError(errno.ENOSPC, "No space left on device", "a file")
        assert run("generate", "m", "x")[::2] == (2, "error: 'a file': No space left on device\n")
        engine.error = FileNotFoundError(errno.ENOENT, "No such file or directory", "a file")
        assert run("generate", "m", "x")[0] == 1

    def test_debug_raises(self, engine, monkeypatch):
        engine.error = RequestError("wrong")
        monkeypatch.setattr("sys.argv", ["draftgraph", "generate", "m", "x", "--debug"])
        with pytest.raises(RequestError, match="wrong"):
            cli.main()

    def test_an_answer_that_failed(self, run, engine):
        engine.configure = lambda made: setattr(made, "finish_reason", "error")
        code, _, err = run("generate", "m", "x")
        assert code == 1
        assert "error: not finite" in err

    @pytest.mark.parametrize("as_json", [False, True])
    def test_ctrl_c_keeps_what_is_there(self, run, engine, as_json):
        engine.configure = lambda made: setattr(made, "interrupt_at", 2)
        code, out, err = run("generate", "m", "x", *(["--json"] if as_json else []))
        assert code == 130
        assert "interrupted" in err
        assert engine.made[0].cancelled
        assert engine.made[0].closed
        if as_json:
            document = json.loads(out)
            assert document["text"] == "To be"
            assert document["token_ids"] == [0, 1]
            assert document["finish_reason"] == "cancelled"
        else:
            assert out.endswith("To be\n")

    def test_ctrl_c_while_loading(self, run, engine):
        engine.error = KeyboardInterrupt()
        assert run("generate", "m", "x")[0] == 130


class TestDemo:
    def test_both_answers_and_the_table(self, run, engine):
        code, out, _ = run("demo", "--model", "some/model")
        assert code == 0
        assert out.count("To be, or not") == 2
        plain, speculative = engine.made
        assert plain.speculation is None
        assert (speculative.speculation.method, speculative.speculation.num_speculative_tokens) == ("ngram", 8)
        assert plain.closed
        assert speculative.closed
        rows = {line.split("│")[1].strip(): line.split("│")[2:4] for line in out.splitlines() if "│" in line}
        cells = {label: [cell.strip() for cell in row] for label, row in rows.items()}
        assert cells["tokens"] == ["4", "4"]
        assert cells["target passes"] == ["4", "2"]
        assert cells["tokens per pass"] == ["1.00", "2.00"]
        assert cells["tokens per second"] == ["0.5", "2.0"]
        assert cells["time to first token"] == ["1000 ms", "1000 ms"]
        assert cells["speed-up"] == ["", "4.00 x"]
        assert cells["identical text"] == ["", "yes"]

    def test_different_texts_are_a_failure(self, run, engine):
        def differ(made):
            if made.speculation is not None:
                made.token_ids = (0, 1, 2, 4)

        engine.configure = differ
        code, out, _ = run("demo")
        assert code == 1
        assert "The texts differ" in out
        assert re.search(r"identical text +│ +│ +no", out)

    @staticmethod
    def ship(tmp_path, **lengths):
        for method, length in lengths.items():
            directory = tmp_path / "heads" / "smollm2-135m" / method
            directory.mkdir(parents=True)
            (directory / "config.json").write_text("{}")
            (directory / "head.json").write_text(json.dumps({"held_out": {"mean_acceptance_length": length}}))

    def test_the_best_head_that_ships_stands_beside_them(self, run, engine, tmp_path):
        self.ship(tmp_path, eagle3=2.5, dspark=2.25)
        code, out, _ = run("demo")
        assert code == 0
        plain, lookup, head = (made.speculation for made in engine.made)
        assert plain is None
        assert lookup.method == "ngram"
        assert (head.method, head.model) == ("eagle3", "eagle3@smollm2-135m")
        assert re.search(r"┃ +plain +┃ +ngram, 8 drafts +┃ +eagle3, 5 drafts +┃", out)
        assert re.search(r"speed-up +│ +│ +4.00 x +│ +4.00 x +│", out)

    def test_methods_are_chosen(self, run, engine, tmp_path):
        self.ship(tmp_path, eagle3=2.5, dspark=2.25)
        code, _, _ = run("demo", "--method", "dspark", "--method", "suffix", "--num-speculative-tokens", "3")
        assert code == 0
        chosen = [made.speculation for made in engine.made[1:]]
        assert [(one.method, one.num_speculative_tokens) for one in chosen] == [("dspark", 3), ("suffix", 3)]
        code, _, err = run("demo", "--method", "dflash")
        assert code == 2
        assert "for smollm2-135m there are only 'dspark@smollm2-135m', 'eagle3@smollm2-135m'" in err
        for name in ("medusa", "none", "eagle4"):
            code, _, err = run("demo", "--method", name)
            assert code == 2
            assert f"demo cannot show method '{name}'" in err
        assert len(engine.made) == 3

    def test_a_failed_answer(self, run, engine):
        engine.configure = lambda made: setattr(made, "finish_reason", "error")
        code, _, err = run("demo")
        assert code == 1
        assert "error: plain: not finite" in err

    def test_an_invalid_option(self, run, engine):
        code, _, err = run("demo", "--num-speculative-tokens", "0")
        assert code == 2
        assert "num_speculative_tokens must be from 1 to 128, got 0" in err
        assert engine.made == []


class TestFetch:
    def test_prints_the_directory_only(self, run, engine, monkeypatch):
        monkeypatch.setattr(cli_fetch, "resolve_model", lambda name: Path("/models") / name)
        code, out, err = run("fetch", "mine")
        assert (code, out) == (0, "/models/mine\n")
        assert "source: /models/mine" in err

    def test_failure(self, run, engine, monkeypatch):
        def fail(name):
            raise FetchError("no room")

        monkeypatch.setattr(cli_fetch, "resolve_model", fail)
        assert run("fetch", "mine") == (2, "", "error: no room\n")


class TestDoctor:
    def test_json(self, run, engine, tmp_path):
        code, out, _ = run("doctor", "--json")
        facts = json.loads(out)
        assert code == (1 if facts["problems"] else 0)
        assert facts["packages"]["torch"].startswith("2.")
        assert facts["cache"]["path"] == str(tmp_path / "cache")
        assert facts["cache"]["writable"]
        assert {executor["name"] for executor in facts["executors"]} == {"host", "round", "loop"}
        (host,) = (executor for executor in facts["executors"] if executor["name"] == "host")
        assert host["available"]

    def test_tables(self, run, engine):
        _, out, _ = run("doctor")
        for word in ("torch", "triton", "bfloat16 on the CPU", "C++ compiler", "CUDA driver", "host", "loop"):
            assert word in out

    def test_an_unusable_cache_is_a_problem(self, run, engine, tmp_path):
        (tmp_path / "cache").write_text("a file")
        code, out, _ = run("doctor")
        assert code == 1
        assert "problem: the cache directory" in out

    def test_problems(self):
        facts = {
            "compiler": {"command": None, "reason": "none found"},
            "cache": {"writable": True},
            "executors": [{"available": False}],
        }
        assert doctor.problems(facts) == [
            "no C++ compiler for torch.compile (none found): install g++, or use compile=False",
            "no executor works here",
        ]
        facts["compiler"] = {"command": "g++", "reason": "Python's headers are missing"}
        facts["executors"] = [{"available": True}]
        assert doctor.problems(facts) == ["torch.compile will fail: Python's headers are missing"]


def test_a_reader_that_leaves_early_is_no_error(tiny_model_path):
    command = [sys.executable, "-m", "draftgraph", "generate", str(tiny_model_path), "hello"]
    options = ["--no-compile", "--max-tokens", "400", "--ignore-eos"]
    with subprocess.Popen([*command, *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.read(1)
        process.stdout.close()
        complaints = process.stderr.read().decode()
    assert process.returncode == 1
    assert "error" not in complaints.lower()
    assert "Traceback" not in complaints
