import pytest

from draftgraph.model_zoo.dspark.training import DSparkOptions
from draftgraph.model_zoo.errors import TrainingConfigError
from draftgraph.model_zoo.training.option_fields import make_options, option_fields
from draftgraph.model_zoo.training.registry import METHODS, trainable


@pytest.mark.parametrize("method", METHODS)
def test_every_option_says_what_it_means(method):
    for field in option_fields(METHODS[method].options).values():
        assert len(field.meaning) > 5, field.name
    assert "num_drafts" in option_fields(METHODS[method].options)


def test_texts_become_options():
    given = {"num_drafts": "7", "decay": "2.5", "causal": "false", "aux_layers": "1, 4", "markov_rank": "8"}
    expected = DSparkOptions(num_drafts=7, decay=2.5, causal=False, aux_layers=(1, 4), markov_rank=8)
    assert make_options("dspark", DSparkOptions, given) == expected
    assert make_options("dspark", DSparkOptions, {"aux_layers": "none", "num_drafts": 2}).aux_layers is None


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"num_draft": "3"},
            r"dspark has no option 'num_draft' \(did you mean 'num_drafts'\?\); its options: .*anchors=32",
        ),
        ({"decay": "fast"}, r"option decay of dspark must be a number, got 'fast'"),
        ({"causal": "yes"}, r"option causal of dspark must be true or false, got 'yes'"),
        ({"aux_layers": " "}, r"must be integers with commas between or none, got ' '"),
        ({"aux_layers": "1,x"}, r"must be integers with commas between or none, got '1,x'"),
        ({"decay": "nan"}, r"decay must be positive and finite, got nan"),
        ({"decay": "inf"}, r"decay must be positive and finite, got inf"),
        ({"confidence_weight": "nan"}, r"confidence_weight must be finite and not negative, got nan"),
        ({"mask_token": "-1"}, r"mask_token must be a token of the target, got -1"),
        ({"num_drafts": "0"}, r"options of dspark: num_drafts must be at least 1, got 0"),
    ],
)
def test_wrong_options_are_named(given, message):
    with pytest.raises(TrainingConfigError, match=message):
        make_options("dspark", DSparkOptions, given)


@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
@pytest.mark.parametrize("method", METHODS)
def test_no_option_takes_what_is_not_finite(method, value):
    for field in option_fields(METHODS[method].options).values():
        if isinstance(field.default, float):
            with pytest.raises(TrainingConfigError, match=f"{field.name} must .*, got {value}"):
                make_options(method, METHODS[method].options, {field.name: value})


def test_an_unknown_method_is_named():
    with pytest.raises(
        TrainingConfigError, match=r"'dflush' can be trained \(did you mean 'dflash'\?\); methods: eagle3"
    ):
        trainable("dflush")
