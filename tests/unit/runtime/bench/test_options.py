import statistics

import pytest

from draftgraph.runtime.bench.options import BenchOptions, Load, method_label
from draftgraph.runtime.errors import ConfigError, DraftgraphError
from draftgraph.runtime.speculative_config import SpeculativeConfig
from draftgraph.runtime.verification import repeats_plain_text


def ngram(depth=4, **options):
    return SpeculativeConfig(method="ngram", num_speculative_tokens=depth, **options)


COUPLED = ngram(rejection_sample_method="coupled")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -1.0}, "temperature must be in"),
        ({"max_tokens": 0}, "max_tokens must be at least 1|max_tokens must be from 1"),
        ({"repeats": 0}, "repeats must be at least 1, got 0"),
        ({"limit": 0}, "limit must be at least 1, got 0"),
        ({"seed": -1}, "seed must be from 0"),
        ({"timeout": 0.0}, "timeout must be"),
        ({"concurrency": 17}, "concurrency must be from 1 to 16, got 17"),
        ({"arrival_rate": 0.0}, "arrival_rate must be"),
        ({"concurrency": 2, "arrival_rate": 1.0}, r"concurrency \(2\) and arrival_rate \(1\) exclude each other"),
        ({"prompt_sets": ()}, "there is nothing to ask"),
        ({"prompt_sets": ("ecko",)}, "no prompt set 'ecko'; sets: echo, chat, code, humaneval, mtbench"),
        ({"prompt_sets": ("echo", "echo")}, "two prompt sets are called 'echo'"),
        ({"prompt_sets": ("missing.jsonl",)}, "no file of prompts 'missing.jsonl'"),
        ({"speculative": (SpeculativeConfig(),)}, "plain decoding is measured anyway"),
        ({"speculative": (ngram(), ngram(prompt_lookup_max=4))}, "the speculative config 'ngram K=4' is given twice"),
        (
            {
                "speculative": (
                    SpeculativeConfig(method="ngram", num_speculative_tokens=2, use_local_argmax_reduction=True),
                )
            },
            "is not available in this version",
        ),
        ({"peers": ("vllm",)}, "no peer 'vllm'; peers: transformers"),
        ({"peers": ("transformers",), "concurrency": 2}, "a peer answers one prompt at a time"),
        ({"assistant": "some/model"}, "no peer is named"),
    ],
)
def test_what_is_refused(options, message):
    with pytest.raises(DraftgraphError, match=message):
        BenchOptions(**options)


def test_labels_tell_configs_apart():
    assert method_label(ngram(8)) == "ngram K=8"
    assert method_label(ngram(8, prompt_lookup_max=6)) == "ngram K=8 prompt_lookup_max=6"
    assert method_label(COUPLED) == "ngram K=4 rejection_sample_method=coupled"
    early = SpeculativeConfig(method="layerskip", exit_layer=3, num_speculative_tokens=4)
    assert method_label(early) == "layerskip E=3 K=4"
    several = SpeculativeConfig(method=["ngram", "custom"], speculator="mine:Own", num_speculative_tokens=4)
    assert method_label(several) == "ngram+custom mine:Own K=4"


def test_which_texts_must_be_those_of_plain_decoding():
    assert repeats_plain_text(ngram(), 0.0)
    assert not repeats_plain_text(ngram(), 0.8)
    assert repeats_plain_text(COUPLED, 0.8)
    synthetic = ngram(rejection_sample_method="synthetic", synthetic_acceptance_length=2.0)
    assert not repeats_plain_text(synthetic, 0.0)


def test_lengths_are_fixed_only_where_texts_differ_by_design():
    assert not BenchOptions().sampling(0).ignore_eos
    assert BenchOptions(temperature=0.8).sampling(0).ignore_eos
    assert not BenchOptions(temperature=0.8, speculative=(COUPLED,)).sampling(0).ignore_eos
    assert BenchOptions(ignore_eos=True).sampling(0).ignore_eos
    assert not BenchOptions(temperature=0.8, ignore_eos=False).sampling(0).ignore_eos


def test_every_request_has_its_own_seed():
    options = BenchOptions(seed=5)
    assert options.sampling(0).seed == 5
    assert options.sampling(10_003).seed == 10_008


def test_load():
    assert BenchOptions().load == Load(concurrency=1)
    assert BenchOptions().load.alone
    assert not BenchOptions(concurrency=2).load.alone
    assert BenchOptions(arrival_rate=2.0).load == Load(concurrency=4, arrival_rate=2.0)
    assert Load().due_times(3, seed=0) is None


def test_arrivals_are_a_poisson_process():
    times = Load(arrival_rate=4.0).due_times(4000, seed=0)
    assert times == Load(arrival_rate=4.0).due_times(4000, seed=0)
    gaps = [b - a for a, b in zip([0.0, *times], times, strict=False)]
    assert min(gaps) > 0.0
    # The mean and the deviation of an exponential are both 1 / rate; of 4000, they are within 5% of it.
    assert statistics.mean(gaps) == pytest.approx(0.25, rel=0.05)
    assert statistics.stdev(gaps) == pytest.approx(0.25, rel=0.05)


def test_settings_are_written_as_json_has_them():
    found = BenchOptions(peers=("transformers",)).to_dict()
    assert found["speculative"][0]["num_speculative_tokens"] == 4
    assert found["prompt_sets"] == ["echo", "chat"]
    assert found["peers"] == ["transformers"]
    assert found["ignore_eos"] is False


def test_a_config_error_is_a_users_mistake():
    with pytest.raises(ConfigError):
        BenchOptions(repeats=0)
