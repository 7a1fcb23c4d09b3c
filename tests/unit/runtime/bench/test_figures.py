import numpy as np
import pytest

from draftgraph.runtime.bench.figures import (
    acceptance,
    burst_waits,
    bursts_of,
    counts_in_bins,
    mean,
    nice_step,
    quantile,
    summed_histograms,
    token_waits,
)

BURSTS = ((0.5, 2), (0.75, 1), (1.5, 3))
"""Six tokens in three bursts, after 0.5, 0.75 and 1.5 s."""


def test_quantiles_by_hand():
    assert quantile([], 0.5) is None
    assert quantile([3.0], 0.95) == 3.0
    assert quantile([4.0, 1.0, 3.0, 2.0], 0.5) == 2.5
    assert quantile([1.0, 2.0, 3.0, 4.0, 5.0], 0.95) == pytest.approx(4.8)
    assert quantile([1.0, 2.0], 0.0) == 1.0
    assert quantile([1.0, 2.0], 1.0) == 2.0


def test_quantiles_are_numpys():
    values = np.random.default_rng(0).exponential(size=37)
    for share in (0.0, 0.1, 0.5, 0.95, 0.99, 1.0):
        assert quantile(values.tolist(), share) == pytest.approx(float(np.quantile(values, share)))


def test_waits_per_token_and_per_burst():
    assert burst_waits(BURSTS) == [0.25, 0.75]
    # The second token came with the first; the last two with the fourth.
    assert token_waits(BURSTS) == [0.0, 0.25, 0.75, 0.0, 0.0]
    assert token_waits(()) == []
    assert burst_waits(((1.0, 4),)) == []
    # Both add up to the time from the first token to the last.
    assert sum(token_waits(BURSTS)) == sum(burst_waits(BURSTS)) == 1.0


def test_bursts_come_back_from_waits():
    assert bursts_of(0.5, token_waits(BURSTS)) == BURSTS
    assert bursts_of(0.5, ()) == ((0.5, 1),)


def test_histograms_add_up():
    first = ((1, 0, 0), (2, 3, 0), (0, 1, 4))
    second = ((0, 0, 0), (1, 0, 0), (5, 0, 1))
    total = summed_histograms([first, second])
    assert total == ((1, 0, 0), (3, 3, 0), (5, 1, 5))
    seen = acceptance(total)
    # 18 rounds; 6 verified one draft and 11 two; 3 + 1 + 2 * 5 were accepted.
    assert seen.rounds == 18
    assert seen.proposed_tokens == 6 + 22
    assert seen.accepted_tokens == 14
    assert seen.mean_acceptance_length == pytest.approx(1 + 14 / 18)
    # Position 1 was verified in 17 rounds and accepted in 3 + 1 + 5; position 2 in 11, accepted in 5.
    assert seen.acceptance_by_position == (pytest.approx(9 / 17), pytest.approx(5 / 11))
    assert summed_histograms([]) == ()
    with pytest.raises(ValueError, match="histograms of 2 and 3 rows cannot be added"):
        summed_histograms([first, ((1, 0), (0, 0))])


def test_mean_and_bins():
    assert mean([]) is None
    assert mean([1.0, 2.0, 6.0]) == 3.0
    assert counts_in_bins([0.0, 0.9, 1.0, 2.5, 3.0, 99.0], [0.0, 1.0, 2.0, 3.0]) == [2, 1, 3]


@pytest.mark.parametrize(
    ("span", "most", "step"), [(10, 5, 2), (9, 5, 2), (1.1, 5, 0.5), (100, 4, 50), (3, 3, 1), (0, 5, 1), (0.3, 3, 0.1)]
)
def test_steps_of_axes(span, most, step):
    assert nice_step(span, most) == pytest.approx(step)
