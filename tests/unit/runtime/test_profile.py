"""The profile of an answer, and the command that shows it."""

from __future__ import annotations

import json

import pytest
import torch
from typer.testing import CliRunner

from draftgraph import Engine, SamplingParams
from draftgraph.profiling import DeviceRates, device_rates
from draftgraph.runtime.cli import app
from draftgraph.runtime.errors import ConfigError, RequestError
from draftgraph.runtime.profile import profile_answer

RATES = DeviceRates(
    device="made up",
    threads=2,
    torch_version="0",
    copy_bandwidth=1e9,
    read_bandwidth=2e9,
    matmul={"float32": 1e9, "bfloat16": 1e9},
)
PROMPT = "Repeat after me: one two three, one two three. Wiederhole: eins zwei drei."
PARAMS = SamplingParams(max_tokens=24, ignore_eos=True)
NGRAM = '{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1}'


def by_name(profile):
    return {str(row.time.name): row for row in profile.rows}


def test_bytes_are_those_of_the_rounds_that_ran(engine):
    plain = engine.generate(PROMPT, PARAMS)
    profile = profile_answer(engine, PROMPT, PARAMS, RATES)
    result, metrics = profile.result, profile.result.metrics
    assert result.token_ids == plain.token_ids
    rows = by_name(profile)
    layer = 48 * (4 + 2 + 2) * 16 + 64 * 48 + 3 * 48 * 96 + 2 * 48
    vocabulary = len(engine.tokenizer)
    weights, per_token = 2 * layer + 48 + 48 * vocabulary, 2 * 2 * 2 * 16

    # What the rounds saw, from the pairs of drafts verified and accepted.
    committed, contexts, windows = metrics.prompt_tokens, [], []
    for verified, accepted in metrics.round_pairs:
        contexts.append(committed - 1)
        windows.append(verified + 1)
        committed += accepted + 1
    context = sum(contexts) / len(contexts)
    for width in (4, 8):
        of_width = [window for window in windows if (4 if window <= 4 else 8) == width]
        row = rows[f"round[1] verify[{width}]"]
        assert row.time.calls == len(of_width)
        window = sum(of_width) / len(of_width)
        assert row.cost.bytes_read == pytest.approx(4 * (weights + width * 48 + context * per_token + window))
        assert row.cost.bytes_written == pytest.approx(4 * (window * per_token + width * (vocabulary + 4)))
    assert rows["round[1] accept"].cost.bytes_read > 4 * vocabulary * sum(windows) / len(windows)
    assert rows["round[1] propose"].cost.bytes > 0
    assert profile.decode.share_of_limit > 0.0
    assert profile.decode.tokens_per_second == pytest.approx(24 / rows["round[1]"].time.seconds)


def test_prefill_chunks_are_counted_by_their_tokens(tiny_model_path):
    options = {"dtype": "float32", "compile": False, "max_batch_size": 1, "max_model_len": 512}
    with Engine.from_pretrained(tiny_model_path, prefix_caching=False, **options) as engine:
        profile = profile_answer(engine, list(range(10, 160)), SamplingParams(max_tokens=2, ignore_eos=True), RATES)
    rows = by_name(profile)
    # 149 tokens: however they are cut into chunks, each is written once.
    prefills = [row for name, row in rows.items() if name.startswith("prefill") and row.time.phase]
    written = sum(row.time.calls * row.cost.bytes_written for row in prefills)
    assert written == pytest.approx(4 * 149 * 2 * 2 * 2 * 16)
    assert "round[1] propose" not in rows


def test_log_probabilities_are_counted(engine):
    params = SamplingParams(max_tokens=4, logprobs=2, ignore_eos=True)
    row = by_name(profile_answer(engine, PROMPT, params, RATES))["round[1] logprobs"]
    assert row.cost.bytes_read >= 4 * len(engine.tokenizer)


def test_what_cannot_be_profiled_is_refused(engine, tiny_model_path):
    with pytest.raises(RequestError, match="a profile is of one answer: n must be 1, got 2"):
        profile_answer(engine, PROMPT, SamplingParams(n=2), RATES)
    options = {"dtype": "float32", "compile": False, "max_batch_size": 1, "max_model_len": 64}
    with (
        Engine.from_pretrained(tiny_model_path, metrics="none", **options) as silent,
        pytest.raises(ConfigError, match="a profile needs metrics 'summary' or 'detailed', got 'none'"),
    ):
        profile_answer(silent, PROMPT, PARAMS, RATES)


@pytest.fixture
def invoke(tiny_model_path, tmp_path, monkeypatch):
    """Runs `draftgraph profile` on the tiny model, on a device whose rates need no measuring."""
    measured = []
    monkeypatch.setenv("DRAFTGRAPH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(device_rates, "measure_rates", lambda device, dtypes: measured.append(dtypes) or RATES)

    def run(*arguments):
        options = ("--no-compile", "--dtype", "float32", "--max-tokens", "8")
        return CliRunner().invoke(app, ["profile", str(tiny_model_path), *options, *arguments])

    run.measured = measured
    return run


def test_the_command_shows_the_table_and_keeps_the_rates(invoke, tmp_path):
    first = invoke("--prompt", PROMPT, "--speculative-config", NGRAM)
    assert first.exit_code == 0, first.output
    for step in ("prefill[", "round[1]", "propose", "budget", "verify[", "accept", "commit"):
        assert step in first.output
    assert "of the limit" in first.output
    assert "limit: 2.0 GB/s, 0.00 TFLOP/s in bfloat16, 0.00 TFLOP/s in float32, measured on made up" in first.output
    invoke("--prompt", PROMPT)
    assert invoke.measured == [(torch.float32,)]
    assert len(list((tmp_path / "cache" / "device-rates").iterdir())) == 1
    invoke("--prompt", PROMPT, "--measure")
    assert len(invoke.measured) == 2


def test_json_goes_to_a_file_or_alone_to_standard_output(invoke, tmp_path):
    file = tmp_path / "profile.json"
    assert invoke("--prompt", PROMPT, "--json", str(file)).exit_code == 0
    document = json.loads(file.read_text())
    assert document["output_tokens"] == 8
    assert document["speculative_config"] == {"method": "none"}
    assert {step["phase"] for step in document["steps"]} == {"", "prefill", "budget", "verify", "accept", "commit"}
    assert document["decode"]["tokens_per_second"] > 0
    assert document["device"]["device"] == "made up"
    printed = json.loads(invoke("--prompt", PROMPT, "--json", "-").stdout)
    assert printed["steps"][0].keys() == document["steps"][0].keys()


def test_a_trace_is_written(invoke, tmp_path):
    file = tmp_path / "trace.json"
    result = invoke("--prompt", PROMPT, "--trace", str(file))
    assert result.exit_code == 0, result.output
    assert str(file) in result.output
    names = {event.get("name") for event in json.loads(file.read_text())["traceEvents"]}
    assert {"draftgraph:round[1]", "draftgraph:round[1] commit"} <= names


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--trace", "no/such/place/trace.json"), "--trace 'no/such/place/trace.json' cannot be written: there is no"),
        (("--json", "."), "--json '.' is a directory"),
        (("--prompt", ""), "the prompt is empty"),
        (("--max-tokens", "0"), "max_tokens"),
        (("--speculative-config", '{"method": "nope"}'), "unknown method 'nope'"),
    ],
)
def test_mistakes_are_told_before_the_model_is_loaded(invoke, monkeypatch, arguments, message):
    def load(*args, **options):
        raise AssertionError("loaded")

    monkeypatch.setattr(Engine, "from_pretrained", load)
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert message in result.output


def test_the_environment_marks_ranges_in_every_engine(tiny_model_path, monkeypatch):
    log = []

    class Domain:
        def get_event_attributes(self, message):
            return message

        def push_range(self, attributes):
            log.append(attributes)

        def pop_range(self):
            pass

        def start_range(self, attributes):
            log.append(attributes)

        def end_range(self, handle):
            log.append("end")

    monkeypatch.setattr("nvtx.get_domain", lambda name: Domain())
    options = {"dtype": "float32", "compile": False, "max_batch_size": 1, "max_model_len": 64}
    monkeypatch.setenv("DRAFTGRAPH_NVTX", "1")
    with Engine.from_pretrained(tiny_model_path, **options) as engine:
        engine.generate("one", SamplingParams(max_tokens=2, ignore_eos=True))
    assert log[0].startswith("request ")
    assert log.index("steady") < log.index("round[1]") < log.index("round[1] verify[4]") < log.index("end")
    assert log.count("round[1]") == 2
    monkeypatch.setenv("DRAFTGRAPH_NVTX", "maybe")
    with pytest.raises(ConfigError, match="DRAFTGRAPH_NVTX must be 0 or 1, got 'maybe'"):
        Engine.from_pretrained(tiny_model_path, **options)
