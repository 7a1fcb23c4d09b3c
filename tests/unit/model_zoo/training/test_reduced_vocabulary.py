import pytest
import torch

from draftgraph.model_zoo.eagle3.checkpoint import target_ids
from draftgraph.model_zoo.errors import TrainingDataError
from draftgraph.model_zoo.training.examples import Example
from draftgraph.model_zoo.training.vocabulary import (
    choose_vocabulary,
    count_tokens,
    coverage,
    draft_to_target,
    size_for,
    target_to_draft,
)


def counts(*numbers):
    return torch.tensor(numbers)


def test_only_answers_are_counted():
    examples = [Example.answered((1, 1, 1), (2, 3, 2)), Example((4, 3, 4, 3), ((1, 2), (3, 4)))]
    assert count_tokens(examples, 6).tolist() == [0, 0, 2, 3, 0, 0]


def test_tokens_of_another_target():
    with pytest.raises(TrainingDataError, match="example 1 holds token 9, but the vocabulary has 6 tokens"):
        count_tokens([Example.answered((1,), (2,)), Example.answered((1,), (9,))], 6)


def test_the_most_frequent_tokens():
    assert choose_vocabulary(counts(1, 5, 0, 7, 5, 5), 3).tolist() == [1, 3, 4]
    assert choose_vocabulary(counts(1, 5, 0, 7, 5, 5), 6).tolist() == [0, 1, 2, 3, 4, 5]


def test_kept_tokens():
    assert choose_vocabulary(counts(1, 5, 0, 7, 5, 5), 3, keep=(2, 0, 2)).tolist() == [0, 2, 3]


def test_maps_are_as_checkpoints_have_them():
    ids = choose_vocabulary(counts(1, 5, 0, 7, 5, 5), 3, keep=[2])
    d2t, t2d = draft_to_target(ids), target_to_draft(ids, 6)
    assert (d2t.dtype, t2d.dtype) == (torch.int64, torch.bool)
    assert (torch.arange(3) + d2t).tolist() == ids.tolist() == [1, 2, 3]
    assert target_ids(d2t, t2d, 6).tolist() == ids.tolist()


def test_coverage():
    numbers = counts(1, 5, 0, 7, 5, 2)
    assert coverage(torch.tensor([1, 3]), numbers) == 12 / 20
    assert coverage(torch.arange(6), numbers) == 1.0
    assert coverage(torch.tensor([1]), counts(0, 0)) == 1.0


def test_the_size_that_a_share_takes():
    numbers = counts(1, 5, 0, 7, 5, 2)
    for keep in ((), (2, 0)):
        for share in (0.05, 0.35, 0.5, 0.9, 1.0):
            size = size_for(numbers, share, keep)
            assert coverage(choose_vocabulary(numbers, max(size, len(keep)), keep), numbers) >= share
            if size > max(1, len(keep)):
                assert coverage(choose_vocabulary(numbers, size - 1, keep), numbers) < share
    assert size_for(numbers, 0.9) == 4
    assert size_for(numbers, 0.9, (2,)) == 5


@pytest.mark.parametrize(
    ("size", "keep", "message"),
    [
        (0, (), "must have 1 to 3 tokens, the target's, got 0"),
        (4, (), "must have 1 to 3 tokens, the target's, got 4"),
        (1, (0, 2), r"of 1 tokens cannot keep 2: \[0, 2\]"),
        (2, (3,), r"from 0 to 2, got \[3\]"),
    ],
)
def test_what_is_refused(size, keep, message):
    with pytest.raises(TrainingDataError, match=message):
        choose_vocabulary(counts(3, 2, 1), size, keep)
