import dataclasses
import json

import pytest

from draftgraph.runtime.errors import ConfigError, DraftgraphError, NotAvailableError
from draftgraph.runtime.speculative_config import SpeculativeConfig
from draftgraph.runtime.speculative_methods import METHODS, Evidence

NGRAM = {"method": "ngram", "num_speculative_tokens": 4}
DRAFT = {"method": "draft_model", "model": "some/draft", "num_speculative_tokens": 4}


def test_nothing_is_plain_decoding():
    for value in (None, {}, "{}", SpeculativeConfig()):
        config = SpeculativeConfig.parse(value)
        assert config.method == "none"
        assert config.num_speculative_tokens is None
        config.require_available()


def test_dict_json_and_object_agree():
    from_dict = SpeculativeConfig.parse(NGRAM)
    assert SpeculativeConfig.parse(json.dumps(NGRAM)) == from_dict
    assert SpeculativeConfig.parse(from_dict) is from_dict
    assert SpeculativeConfig.parse(from_dict.to_dict()) == from_dict
    from_dict.require_available()


@pytest.mark.parametrize(
    ("given", "expected"),
    [({}, (2, 4)), ({"max": 1}, (1, 1)), ({"max": 8}, (2, 8)), ({"min": 3}, (3, 4)), ({"min": 6}, (6, 6))],
)
def test_lookup_range_defaults(given, expected):
    config = SpeculativeConfig.parse(NGRAM | {f"prompt_lookup_{key}": value for key, value in given.items()})
    assert (config.prompt_lookup_min, config.prompt_lookup_max) == expected


def test_names_of_other_engines():
    assert SpeculativeConfig.parse(NGRAM | {"method": "ngram_gpu"}).method == "ngram"
    assert SpeculativeConfig.parse({"method": "deepseek_mtp"}).method == "mtp"


def test_methods_say_what_their_confidences_are():
    assert METHODS["none"].evidence is Evidence.NONE
    assert SpeculativeConfig.parse(NGRAM | {"enable_adaptive_verification": True}).traits.evidence is Evidence.POSITION
    both = DRAFT | {"method": ["ngram", "draft_model"], "enable_adaptive_verification": True}
    assert SpeculativeConfig.parse(both).traits.evidence is Evidence.PROBABILITY
    drafting = {name for name, method in METHODS.items() if method.drafts and not method.user_class}
    assert {name for name in drafting if METHODS[name].evidence is Evidence.NONE} == set()


def test_round_trip_of_every_option_kind():
    config = SpeculativeConfig.parse(
        DRAFT
        | {
            "rejection_sample_method": "synthetic",
            "synthetic_acceptance_rates": [1, 0.5, 0.5, 0],
            "num_speculative_tokens_per_batch_size": [[5, 8, 1], [1, 2, 4]],
        }
    )
    assert config.synthetic_acceptance_rates == (1.0, 0.5, 0.5, 0.0)
    assert config.num_speculative_tokens_per_batch_size == ((1, 2, 4), (5, 8, 1))
    assert SpeculativeConfig.parse(json.dumps(config.to_dict())) == config


def test_draft_limits_carry_the_previous_depth_over_gaps():
    config = SpeculativeConfig.parse(
        NGRAM | {"num_speculative_tokens_per_batch_size": [[1, 2, 4], [4, 4, 2], [6, 7, 0]]}
    )
    assert config.draft_limits(8) == (4, 4, 4, 4, 2, 2, 0, 0, 0)
    assert SpeculativeConfig.parse(NGRAM).draft_limits(2) == (4, 4, 4)
    assert SpeculativeConfig().draft_limits(1) == (0, 0)


INVALID = [
    ("not json", r"not JSON.*'not json'.*\"method\": \"ngram\""),
    ("[1]", r"dict, JSON or None, got \[1\]"),
    (7, r"dict, JSON or None, got 7"),
    (
        NGRAM | {"num_speculative_token": 4},
        r"'num_speculative_token' \(did you mean 'num_speculative_tokens'",
    ),
    (NGRAM | {"zzz": 4}, r"no option 'zzz'; options: method, model"),
    ({"num_speculative_tokens": 4}, r"names no method; methods: none, ngram"),
    (
        {"method": "ngrams", "num_speculative_tokens": 4},
        r"unknown method 'ngrams' \(did you mean 'ngram'\?\)",
    ),
    ({"method": "warp"}, r"unknown method 'warp'.*methods: none, ngram, suffix, draft_model, eagle"),
    ({"method": None}, r"method must be one of none, ngram.*got None"),
    ({"method": "none", "num_speculative_tokens": 4}, r"num_speculative_tokens is 4, but method 'none'"),
    ({"method": "ngram"}, r"'ngram' needs num_speculative_tokens \(K\).*from 1 to 128"),
    ({"method": "draft_model", "model": "x"}, r"'draft_model' needs num_speculative_tokens"),
    ({"method": "layerskip"}, r"'layerskip' needs exit_layer"),
    (
        {"method": "layerskip", "exit_layer": 2, "num_speculative_tokens": 2, "model": "some/draft"},
        r"model is .some/draft., but method .layerskip. takes none; methods with one: .draft_model., ",
    ),
    ({"method": "medusa"}, r"'medusa' needs model"),
    (NGRAM | {"num_speculative_tokens": 0}, r"num_speculative_tokens must be from 1 to 128, got 0"),
    (NGRAM | {"num_speculative_tokens": -3}, r"from 1 to 128, got -3"),
    (NGRAM | {"num_speculative_tokens": 129}, r"from 1 to 128, got 129"),
    (NGRAM | {"num_speculative_tokens": "4"}, r"num_speculative_tokens must be an integer, got '4'"),
    (NGRAM | {"num_speculative_tokens": True}, r"must be an integer, got True"),
    (NGRAM | {"num_speculative_tokens": 4.0}, r"must be an integer, got 4\.0"),
    (NGRAM | {"prompt_lookup_min": 5, "prompt_lookup_max": 3}, r"min \(5\) must not exceed .*max \(3\)"),
    (NGRAM | {"prompt_lookup_min": 0}, r"prompt_lookup_min must be at least 1, got 0"),
    (NGRAM | {"prompt_lookup_max": -1}, r"prompt_lookup_max must be at least 1, got -1"),
    (DRAFT | {"dspark_draft_topk": 0}, r"dspark_draft_topk must be at least 1, got 0"),
    (DRAFT | {"model": 3}, r"model must be a non-empty string or None, got 3"),
    (DRAFT | {"attention_backend": ""}, r"attention_backend must be a non-empty string"),
    (DRAFT | {"attention_backend": "sdpa"}, r"attention_backend needs method 'dflash', 'dspark', got 'draft_model'"),
    (
        {"method": "dflash", "model": "m", "attention_backend": "FLASH_ATTN"},
        r"attention_backend must be one of 'triton', 'sdpa', 'reference', got 'FLASH_ATTN'",
    ),
    (
        {"method": "dflash", "model": "m", "dspark_draft_topk": 4},
        r"dspark_draft_topk needs method 'dspark', got 'dflash'",
    ),
    (NGRAM | {"draft_sample_method": "gready"}, r"one of 'greedy', 'probabilistic', got 'gready'"),
    (NGRAM | {"rejection_sample_method": "x"}, r"'standard', 'block', 'synthetic', 'coupled', got 'x'"),
    (NGRAM | {"rejection_sample_method": ["standard"]}, r"rejection_sample_method must be one of"),
    (NGRAM | {"parallel_drafting": 1}, r"parallel_drafting must be true or false, got 1"),
    (
        NGRAM | {"use_heterogeneous_vocab": True},
        r"use_heterogeneous_vocab needs method 'draft_model', got 'ngram'",
    ),
    (
        DRAFT | {"use_heterogeneous_vocab": True, "draft_sample_method": "probabilistic"},
        r"use_heterogeneous_vocab needs draft_sample_method 'greedy'",
    ),
    (
        DRAFT | {"use_local_argmax_reduction": True, "draft_sample_method": "probabilistic"},
        r"use_local_argmax_reduction needs draft_sample_method 'greedy'",
    ),
    (
        {"method": "none", "enable_adaptive_verification": True},
        r"enable_adaptive_verification needs a method that drafts, got 'none'",
    ),
    (NGRAM | {"enable_adaptive_verification": 1}, r"enable_adaptive_verification must be true or false, got 1"),
    (NGRAM | {"adaptive_profile_context_len": 0}, r"adaptive_profile_context_len must be .*1.*got 0"),
    (NGRAM | {"rejection_sample_method": "synthetic"}, r"exactly one of .*rates.*length, got neither"),
    (
        NGRAM
        | {
            "rejection_sample_method": "synthetic",
            "synthetic_acceptance_rates": [1, 1, 1, 1],
            "synthetic_acceptance_length": 2.0,
        },
        r"exactly one of .* got both",
    ),
    (
        NGRAM | {"synthetic_acceptance_length": 2.0},
        r"synthetic_acceptance_length needs .*'synthetic'.*'standard'",
    ),
    (
        NGRAM | {"rejection_sample_method": "block", "synthetic_acceptance_rates": [1, 1, 1, 1]},
        r"synthetic_acceptance_rates needs .* cannot go together with 'block'",
    ),
    (
        {"method": "none", "num_speculative_tokens_per_batch_size": [[1, 2, 0], [3, 4, 1]]},
        r"K of \[3, 4, 1\] exceeds num_speculative_tokens \(0\)",
    ),
    (
        {"method": "none", "rejection_sample_method": "synthetic", "synthetic_acceptance_rates": [0.5]},
        r"synthetic_acceptance_rates needs num_speculative_tokens = 0 values, got 1",
    ),
    (
        {"method": "none", "rejection_sample_method": "synthetic", "synthetic_acceptance_length": 2},
        r"synthetic_acceptance_length must be in \[1, 1\], got 2",
    ),
    ({"suffix_decoding_min_token_prob": 1.5, "method": "suffix"}, r"in \[0, 1\], got 1\.5"),
    ({"suffix_decoding_max_spec_factor": -1, "method": "suffix"}, r"at least 0, got -1"),
    ({"suffix_decoding_max_tree_depth": None, "method": "suffix"}, r"must be an integer, got None"),
    ({"suffix_decoding_max_cached_requests": -1, "method": "suffix"}, r"at least 0, got -1"),
]


@pytest.mark.parametrize(("value", "message"), INVALID, ids=[str(i) for i in range(len(INVALID))])
def test_invalid(value, message):
    with pytest.raises(ConfigError, match=message) as caught:
        SpeculativeConfig.parse(value)
    assert isinstance(caught.value, DraftgraphError)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("rates", [1, 1, 1], r"= 4 values, got 3"),
        ("rates", [1, 0.5, 0.6, 0], r"must not increase"),
        ("rates", [1.1, 1, 1, 1], r"in \[0, 1\], got 1\.1"),
        ("rates", [float("nan"), 1, 1, 1], r"in \[0, 1\], got nan"),
        ("rates", [1, 1, 1, -0.1], r"in \[0, 1\], got -0\.1"),
        ("rates", 0.5, r"must be a list of numbers in \[0, 1\], got 0\.5"),
        ("length", 0.5, r"in \[1, 5\], got 0\.5"),
        ("length", 5.5, r"in \[1, 5\], got 5\.5"),
        ("length", "2", r"in \[1, 5\], got '2'"),
    ],
)
def test_synthetic_values(option, value, message):
    with pytest.raises(ConfigError, match=message):
        SpeculativeConfig.parse(
            NGRAM | {"rejection_sample_method": "synthetic", f"synthetic_acceptance_{option}": value}
        )


@pytest.mark.parametrize("length", [1, 5, 2.5])
def test_synthetic_length_bounds_are_included(length):
    config = SpeculativeConfig.parse(
        NGRAM | {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": length}
    )
    assert config.synthetic_acceptance_length == length


@pytest.mark.parametrize(
    ("ranges", "message"),
    [
        ([[1, 2, 4], [2, 3, 1]], r"\[1, 2, 4\] and \[2, 3, 1\] overlap"),
        ([[2, 3, 1]], r"must start at 1 row, got \[2, 3, 1\]"),
        ([[1, 2, 5]], r"K of \[1, 2, 5\] exceeds num_speculative_tokens \(4\)"),
        ([[3, 1, 2]], r"1 <= first <= last and K >= 0, got \[3, 1, 2\]"),
        ([[0, 1, 2]], r"got \[0, 1, 2\]"),
        ([[1, 1, -1]], r"got \[1, 1, -1\]"),
        ([[1, 2]], r"got \[1, 2\]"),
        ([[1, 2, True]], r"got \[1, 2, True\]"),
        ([], r"got \[\]"),
        (3, r"got 3"),
    ],
)
def test_batch_ranges(ranges, message):
    with pytest.raises(ConfigError, match=message):
        SpeculativeConfig.parse(NGRAM | {"num_speculative_tokens_per_batch_size": ranges})


def test_constructor_checks_too():
    with pytest.raises(ConfigError, match="unknown method"):
        SpeculativeConfig(method="warp")
    with pytest.raises(TypeError):
        SpeculativeConfig("ngram")


class TestCheckpoint:
    @pytest.mark.parametrize("key", ["num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules"])
    def test_depth_of_mtp_is_the_modules_count(self, key):
        config = SpeculativeConfig.parse({"method": "mtp"})
        assert config.num_speculative_tokens is None
        assert config.check_checkpoint({key: 3}).num_speculative_tokens == 3
        assert config.check_checkpoint({"text_config": {key: 2}}).num_speculative_tokens == 2

    @pytest.mark.parametrize(("depth", "predicted"), [(4, 2), (1, 2), (2, 2), (3, 1), (2, 3)])
    def test_divisible_or_smaller(self, depth, predicted):
        config = SpeculativeConfig.parse({"method": "mtp", "num_speculative_tokens": depth})
        checked = config.check_checkpoint({"num_nextn_predict_layers": predicted})
        assert checked.num_speculative_tokens == depth

    def test_not_divisible(self):
        config = SpeculativeConfig.parse({"method": "mtp", "num_speculative_tokens": 5})
        with pytest.raises(ConfigError, match=r"is 5, but .*n_predict = 2.*multiple"):
            config.check_checkpoint({"num_nextn_predict_layers": 2})

    def test_the_target_of_a_draft_model_may_have_mtp_modules(self):
        config = SpeculativeConfig.parse(DRAFT | {"num_speculative_tokens": 5})
        sizes = {"vocab_size": 10, "num_nextn_predict_layers": 2}
        assert config.check_checkpoint(sizes, sizes) == config

    @pytest.mark.parametrize(
        ("method", "draft", "depth"),
        [
            ("eagle3", {"speculators_config": {"proposal_methods": [{"speculative_tokens": 3}]}}, 3),
            ("medusa", {"medusa_num_heads": 5}, 5),
            ("dflash", {"block_size": 16}, 15),
            ("dflash", {"dflash_config": {"block_size": 16, "sample_from_anchor": True}}, 16),
            ("dflash", {"speculators_model_type": "dflash", "block_size": 8}, 7),
            ("dspark", {"block_size": 7}, 7),
            ("dspark", {"block_size": 7, "sample_from_anchor": False}, 6),
            ("dspark", {"speculators_model_type": "dspark", "block_size": 8}, 7),
        ],
    )
    def test_depth_given_by_the_draft(self, method, draft, depth):
        config = SpeculativeConfig.parse({"method": method, "model": "some/draft"})
        assert config.check_checkpoint({}, draft).num_speculative_tokens == depth

    @pytest.mark.parametrize("method", ["eagle", "eagle3", "medusa", "dflash", "mtp"])
    def test_depth_given_by_nobody(self, method):
        config = SpeculativeConfig.parse({"method": method, "model": "some/draft"})
        with pytest.raises(ConfigError, match=f"'{method}' needs num_speculative_tokens.*does not give it"):
            config.check_checkpoint({}, {})

    def test_the_draft_config_is_required(self):
        with pytest.raises(ConfigError, match=r"needs the config\.json of its draft 'some/draft'"):
            SpeculativeConfig.parse(DRAFT).check_checkpoint({"vocab_size": 10})

    def test_vocabularies(self):
        config = SpeculativeConfig.parse(DRAFT)
        with pytest.raises(ConfigError, match=r"has 10 tokens and the draft model's 12.*use_heterogeneous_vocab"):
            config.check_checkpoint({"vocab_size": 10}, {"text_config": {"vocab_size": 12}})
        assert config.check_checkpoint({"vocab_size": 10}, {"vocab_size": 10}) == config
        mixed = SpeculativeConfig.parse(DRAFT | {"use_heterogeneous_vocab": True})
        assert mixed.check_checkpoint({"vocab_size": 10}, {"vocab_size": 12}) == mixed

    def test_synthetic_rates_are_checked_once_the_depth_is_known(self):
        config = SpeculativeConfig.parse(
            {
                "method": "mtp",
                "rejection_sample_method": "synthetic",
                "synthetic_acceptance_rates": [1.0, 0.5],
            }
        )
        assert config.check_checkpoint({"num_nextn_predict_layers": 2}).num_speculative_tokens == 2
        with pytest.raises(ConfigError, match="= 3 values, got 2"):
            config.check_checkpoint({"num_nextn_predict_layers": 3})

    def test_methods_without_a_checkpoint(self):
        for value in (None, NGRAM):
            config = SpeculativeConfig.parse(value)
            assert config.check_checkpoint({"vocab_size": 10}) == config


class TestAvailability:
    @pytest.mark.parametrize("method", ["mtp", "dspark"])
    def test_unavailable_methods(self, monkeypatch, method):
        """As a version would say it that knows the method and has not got it."""
        absent = dataclasses.replace(METHODS[method], available=False)
        monkeypatch.setattr("draftgraph.runtime.speculative_config.METHODS", {**METHODS, method: absent})
        config = SpeculativeConfig.parse({"method": method, "model": "x", "num_speculative_tokens": 2})
        with pytest.raises(NotAvailableError, match=f"'{method}'.*not available.*available: 'none', 'ngram'"):
            config.require_available()

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            (
                {"draft_sample_method": "probabilistic"},
                r"'probabilistic' is not available.*'ngram'.*'greedy'",
            ),
            ({"parallel_drafting": True}, r"parallel_drafting is not available.*False"),
            ({"use_local_argmax_reduction": True}, r"use_local_argmax_reduction is not available"),
        ],
    )
    def test_unavailable_options(self, options, message):
        config = SpeculativeConfig.parse(NGRAM | options)
        with pytest.raises(NotAvailableError, match=message):
            config.require_available()

    @pytest.mark.parametrize("verification", ["standard", "coupled"])
    def test_available(self, verification):
        config = SpeculativeConfig.parse(NGRAM | {"rejection_sample_method": verification})
        assert config.require_available() is None
