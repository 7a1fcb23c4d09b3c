import json

import pytest

from draftgraph.model_zoo.errors import TrainingDataError
from draftgraph.model_zoo.training.examples import Example, examples_hash
from draftgraph.model_zoo.training.split import split_examples

CHAT = Example((5, 6, 7, 8, 9, 10, 11), ((2, 4), (5, 7)))


def test_parts_of_an_example():
    assert CHAT.prompt == (5, 6)
    assert CHAT.answer_tokens() == (7, 8, 10, 11)
    assert Example.of_text([1, 2, 3]) == Example((1, 2, 3), ((1, 3),))
    assert Example.answered([1, 2], [3]) == Example((1, 2, 3), ((2, 3),))


def test_json_and_back():
    assert Example.from_json(json.loads(json.dumps(CHAT.to_json()))) == CHAT
    assert hash(Example([5, 6], [[1, 2]])) == hash(Example((5, 6), ((1, 2),)))


@pytest.mark.parametrize("value", [None, [], {"tokens": [1, 2]}, {"tokens": 1, "answer": []}, {"tokens": [1], "x": 1}])
def test_what_is_no_example(value):
    with pytest.raises(TrainingDataError, match="an object of the lists 'tokens' and 'answer'"):
        Example.from_json(value)


@pytest.mark.parametrize(
    ("tokens", "answer", "message"),
    [
        ((1,), ((1, 2),), "at least 2 tokens, this one has 1"),
        ((1, -2), ((1, 2),), "integers of at least 0; got -2"),
        ((1, True), ((1, 2),), "got True"),
        ((1, 2.0), ((1, 2),), "got 2.0"),
        ((1, 2), (), "at least one span"),
        ((1, 2), ((0, 2),), r"positions 1 to 2 .* got \[\(0, 2\)\]"),
        ((1, 2), ((1, 1),), "non-empty and ascending"),
        ((1, 2), ((1, 3),), "within positions 1 to 2"),
        ((1, 2, 3), ((2, 3), (1, 2)), "ascending"),
        ((1, 2, 3), ((1, 3), (2, 3)), "ascending"),
        ((1, 2), ((1, 2, 3),), r"a span is a pair of positions, got \[1, 2, 3\]"),
        ((1, 2), (1,), "a span is a pair of positions, got 1"),
    ],
)
def test_examples_that_are_refused(tokens, answer, message):
    with pytest.raises(TrainingDataError, match=message):
        Example(tokens, answer)


def test_cutting():
    assert CHAT.cut(7) is CHAT
    assert CHAT.cut(6) == Example((5, 6, 7, 8, 9, 10), ((2, 4), (5, 6)))
    assert CHAT.cut(5) == Example((5, 6, 7, 8, 9), ((2, 4),))
    assert CHAT.cut(3) == Example((5, 6, 7), ((2, 3),))
    assert CHAT.cut(2) is None


def test_the_hash_sees_everything():
    others = [
        [CHAT, CHAT],
        [Example(CHAT.tokens, ((2, 4),))],
        [Example((*CHAT.tokens[:-1], 12), CHAT.answer)],
        [Example((1, 2), ((1, 2),)), Example((3, 4), ((1, 2),))],
        [Example((3, 4), ((1, 2),)), Example((1, 2), ((1, 2),))],
    ]
    assert len({examples_hash(each) for each in [[CHAT], *others]}) == 6
    assert examples_hash([CHAT]) == examples_hash([Example(CHAT.tokens, CHAT.answer)])


def answered(prompt):
    return Example.answered((prompt, prompt + 1), (0,))


def test_the_split_depends_on_the_prompt_alone():
    examples = [answered(n) for n in range(400)]
    train, held_out = split_examples(examples, 0.1)
    assert set(train) | set(held_out) == set(examples)
    assert not set(train) & set(held_out)
    assert 20 <= len(held_out) <= 60
    assert list(held_out) == [e for e in examples if e in set(held_out)]
    more_train, more_out = split_examples([answered(n) for n in range(800)][::-1], 0.1)
    assert set(train) <= set(more_train)
    assert set(held_out) <= set(more_out)
    assert split_examples(examples, 0.1, seed=1)[1] != held_out
    wider = split_examples(examples, 0.3)[1]
    assert set(held_out) < set(wider)


def test_answers_to_one_prompt_stay_together():
    examples = [Example.answered((n, 1), (answer,)) for n in range(50) for answer in range(3)]
    train, held_out = split_examples(examples, 0.3)
    assert not {e.prompt for e in train} & {e.prompt for e in held_out}


def test_texts_are_told_apart_by_all_of_them():
    texts = [Example.of_text((0, n, n)) for n in range(100)]
    train, held_out = split_examples(texts, 0.3)
    assert 15 <= len(held_out) <= 45
    assert len(train) + len(held_out) == 100


@pytest.mark.parametrize("share", [1e-12, 1 - 1e-12])
def test_no_side_is_empty(share):
    train, held_out = split_examples([answered(n) for n in range(5)], share)
    assert {len(train), len(held_out)} == {1, 4}


def test_splits_that_are_refused():
    with pytest.raises(TrainingDataError, match="above 0 and below 1, got 1"):
        split_examples([answered(1), answered(2)], 1)
    with pytest.raises(TrainingDataError, match="at least two with different prompts, got 2 with 1 different"):
        split_examples([answered(1), answered(1)], 0.5)
    with pytest.raises(TrainingDataError, match="got 0 with 0 different"):
        split_examples([], 0.5)
