import json

import pytest
from typer.testing import CliRunner

from draftgraph.profiling.speed_model import Acceptance, RoundCosts
from draftgraph.runtime import cli
from draftgraph.runtime.engine_config import EngineConfig
from draftgraph.runtime.errors import RequestError
from draftgraph.runtime.loading import load_target
from draftgraph.runtime.plan.measure import BucketCosts, measure_acceptance, measure_costs, with_depth
from draftgraph.runtime.plan.planner import given_costs, make_plan
from draftgraph.runtime.sampling_params import SamplingParams
from draftgraph.runtime.speculative_config import SpeculativeConfig

NGRAM = SpeculativeConfig(method="ngram", num_speculative_tokens=2, prompt_lookup_min=1)
EXAMPLE = ("--alpha", "0.8", "--baseline-ms", "10", "--draft-ms", "1", "--verify-ms", "12", "--state-ms", "2")


def invoke(*arguments):
    return CliRunner().invoke(cli.app, ["plan", *map(str, arguments)], env={"COLUMNS": "120"})


def silent(*_):
    pass


def config(depth, **changes):
    options = {"dtype": "float32", "compile": False, "max_batch_size": 2, "max_model_len": 512}
    return EngineConfig(speculative=with_depth(NGRAM, depth), **{**options, **changes})


@pytest.fixture(scope="module")
def target(tiny_model_path):
    return load_target(tiny_model_path, config(6), None)


def test_costs_of_every_bucket_and_depth(target):
    found = measure_costs(target, config(6), "one two three, one two three", progress=silent)
    assert [costs.bucket for costs in found] == [1, 2]
    for costs in found:
        assert list(costs.by_depth) == [1, 2, 3, 4, 5, 6]
        assert costs.plain.draft_ms == 0.0
        assert costs.undrafted.draft_ms > 0.0
        assert all(c.draft_ms > 0.0 and c.state_ms > 0.0 for c in costs.by_depth.values())
    # Depths whose windows need the same width share its verify: at one row 4 positions hold 3 drafts, 8 hold 6.
    verify = [found[0].by_depth[depth].verify_ms for depth in (1, 3, 4, 6)]
    assert verify[0] == verify[1] != verify[2] == verify[3]


def test_a_prompt_without_room_is_refused(target):
    with pytest.raises(RequestError, match="rounds to measure add up to"):
        measure_costs(target, config(6), [5] * 450, progress=silent)


def test_acceptance_is_what_the_engine_counts(target):
    from draftgraph.runtime.engine import Engine
    from draftgraph.runtime.loading import build_core

    params, prompts = SamplingParams(max_tokens=40, ignore_eos=True), ["one two three", "def add(a, b):"]
    found = measure_acceptance(target, config(4), prompts, params, progress=silent)
    with Engine(target, build_core(target, config(4)), config(4)) as engine:
        metrics = [engine.generate(prompt, params).metrics for prompt in prompts]
    rounds = sum(m.rounds for m in metrics)
    drafted = sum(sum(map(sum, m.acceptance_histogram[1:])) for m in metrics)
    assert found.coverage == pytest.approx(drafted / rounds)
    assert 0.0 < found.alpha < 1.0
    # The model's tokens per round come close to those that were counted.
    tokens = sum(m.accepted_tokens for m in metrics) / rounds + 1
    expected = found.coverage * sum(found.alpha**k for k in range(5)) + 1 - found.coverage
    assert expected == pytest.approx(tokens, rel=0.15)


def bucket_costs(bucket, per_draft):
    plain = RoundCosts(verify_ms=10.0)
    by_depth = {k: RoundCosts(verify_ms=10.0 + per_draft * k) for k in (1, 2, 3)}
    return BucketCosts(bucket=bucket, plain=plain, undrafted=plain, by_depth=by_depth)


def test_the_suggestion_follows_the_batch_size():
    costs = [bucket_costs(1, 0.0), bucket_costs(2, 0.0), bucket_costs(4, 20.0)]
    found = make_plan(costs, Acceptance(alpha=0.8))
    assert [bucket.depth for bucket in found.buckets] == [3, 3, 0]
    assert found.table == [[1, 2, 3], [3, 4, 0]]
    suggestion = found.suggestion(NGRAM)
    assert suggestion.num_speculative_tokens == 3
    assert suggestion.num_speculative_tokens_per_batch_size == ((1, 2, 3), (3, 4, 0))
    assert suggestion.draft_limits(4) == (3, 3, 3, 0, 0)
    alike = make_plan(costs[:2], Acceptance(alpha=0.8)).suggestion(NGRAM)
    assert alike.num_speculative_tokens_per_batch_size is None
    assert make_plan(costs[2:], Acceptance(alpha=0.8)).suggestion(NGRAM) == SpeculativeConfig()


@pytest.mark.parametrize(
    ("alpha", "draft", "tokens", "round_ms", "per_token", "speed_up"),
    [(0.8, 1.0, 3.3616, 18.0, 5.355, 1.868), (0.9, 3.0, 4.0951, 26.0, 6.349, 1.575)],
)
def test_worked_examples(alpha, draft, tokens, round_ms, per_token, speed_up):
    costs = given_costs(baseline_ms=10.0, draft_ms=draft, verify_ms=12.0, state_ms=2.0, most_drafts=16)
    estimates = make_plan([costs], Acceptance(alpha=alpha)).buckets[0].estimates
    assert [e.num_drafts for e in estimates] == list(range(17))
    four = estimates[4]
    assert four.tokens_per_round == pytest.approx(tokens, abs=5e-5)
    assert four.round_ms == round_ms
    assert four.ms_per_token == pytest.approx(per_token, abs=5e-4)
    assert four.speed_up == pytest.approx(speed_up, abs=5e-4)


def test_the_command_with_given_costs():
    result = invoke(*EXAMPLE)
    assert result.exit_code == 0, result.output
    assert "1.868 x" in result.output
    assert "5.355" in result.output
    assert "suggested: 1 row: K = 6" in result.output
    document = json.loads(invoke(*EXAMPLE, "--json").stdout)
    assert document["alpha_measured"] is False
    (bucket,) = document["buckets"]
    assert len(bucket["estimates"]) == 17
    assert bucket["estimates"][4]["speed_up"] == pytest.approx(1.868, abs=5e-4)
    assert document["speculative_config"]["num_speculative_tokens"] == bucket["suggested_drafts"]
    SpeculativeConfig.parse(document["speculative_config"])


def test_the_command_says_when_speculation_does_not_pay():
    costs = ("--baseline-ms", "10", "--draft-ms", "9", "--verify-ms", "20")
    assert "decode plainly" in invoke("--alpha", "0.1", *costs).output


def test_the_command_with_a_model(tiny_model_path):
    options = ("--no-compile", "--dtype", "float32", "--max-drafts", "3", "--max-batch-size", "2", "--max-tokens", "12")
    prompts = ("--prompt", "one two three", "--prompt", "drei zwei")
    document = json.loads(invoke(tiny_model_path, *options, *prompts, "--json").stdout)
    assert document["alpha_measured"] is True
    assert 0.0 <= document["alpha"] <= 1.0
    assert [bucket["bucket"] for bucket in document["buckets"]] == [1, 2]
    assert all(len(bucket["estimates"]) == 4 for bucket in document["buckets"])
    table = document["num_speculative_tokens_per_batch_size"]
    assert (table[0][0], table[-1][1]) == (1, 2)
    SpeculativeConfig.parse(document["speculative_config"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "without a model every cost must be given: --alpha, --baseline-ms, --draft-ms, --verify-ms missing"),
        (("--alpha", "1.1"), "--alpha must be in [0, 1], got 1.1"),
        (("--alpha", "nan"), "--alpha must be in [0, 1], got nan"),
        ((*EXAMPLE[:-1], "-2"), "--state-ms must be a finite number of at least 0, got -2.0"),
        ((*EXAMPLE, "--verify-ms", "0"), "--verify-ms must be a finite number above 0, got 0.0"),
        (("no-such-model", "--verify-ms", "3"), "--verify-ms cannot go together with a model"),
        (("no-such-model", "--max-drafts", "0"), "--max-drafts must be from 1 to 64, got 0"),
        (("no-such-model", "--max-batch-size", "17"), "--max-batch-size must be from 1 to 16, got 17"),
        (("no-such-model", "--speculative-config", '{"method": "none"}'), "nothing to plan for method 'none'"),
        (("no-such-model", "--speculative-config", '{"method": "nothing"}'), "unknown method 'nothing'"),
        (("no-such-model", "--temperature", "-1"), "temperature"),
    ],
)
def test_bad_input_is_refused(arguments, message):
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.split())
