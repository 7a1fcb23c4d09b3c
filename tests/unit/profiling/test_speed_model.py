import math

import pytest

from draftgraph.profiling.speed_model import (
    Acceptance,
    Estimate,
    RoundCosts,
    best_depth,
    depth_table,
    estimate,
    expected_tokens,
)


@pytest.mark.parametrize(("alpha", "tokens"), [(0.5, 1.94), (0.7, 2.77), (0.9, 4.10)])
def test_tokens_of_four_drafts(alpha, tokens):
    assert expected_tokens(alpha, 4) == pytest.approx(tokens, abs=0.005)
    assert expected_tokens(alpha, 4) == pytest.approx((1 - alpha**5) / (1 - alpha), rel=1e-12)


def test_tokens_at_the_ends():
    assert expected_tokens(0.0, 7) == 1.0
    assert expected_tokens(1.0, 7) == 8.0
    assert expected_tokens(0.3, 0) == 1.0


@pytest.mark.parametrize(
    ("alpha", "draft", "tokens", "round_ms", "per_token", "speed_up"),
    [(0.8, 1.0, 3.3616, 18.0, 5.355, 1.868), (0.9, 3.0, 4.0951, 26.0, 6.349, 1.575)],
)
def test_worked_examples(alpha, draft, tokens, round_ms, per_token, speed_up):
    costs = RoundCosts(draft_ms=4 * draft, verify_ms=12.0, state_ms=2.0)
    found = estimate(Acceptance(alpha=alpha), 4, baseline_ms=10.0, costs=costs)
    assert found.tokens_per_round == pytest.approx(tokens, abs=5e-5)
    assert found.round_ms == round_ms
    assert found.ms_per_token == pytest.approx(per_token, abs=5e-4)
    assert found.speed_up == pytest.approx(speed_up, abs=5e-4)


def test_no_drafts_are_plain_decoding():
    found = estimate(Acceptance(alpha=0.9), 0, baseline_ms=10.0, costs=RoundCosts(verify_ms=99.0))
    assert (found.speed_up, found.tokens_per_round, found.ms_per_token) == (1.0, 1.0, 10.0)


def test_coverage_averages_the_two_kinds_of_rounds():
    costs, undrafted = RoundCosts(draft_ms=1.0, verify_ms=12.0), RoundCosts(draft_ms=1.0, verify_ms=9.0)
    common = {"baseline_ms": 10.0, "costs": costs, "undrafted": undrafted}
    found = estimate(Acceptance(alpha=0.5, coverage=0.25), 2, **common)
    assert found.tokens_per_round == pytest.approx(0.25 * 1.75 + 0.75)
    assert found.round_ms == pytest.approx(0.25 * 13 + 0.75 * 10)
    assert estimate(Acceptance(alpha=0.5, coverage=0.0), 2, **common).speed_up == 1.0
    with pytest.raises(ValueError, match="without drafts"):
        estimate(Acceptance(alpha=0.5, coverage=0.5), 2, baseline_ms=10.0, costs=costs)


def test_acceptance_from_what_was_counted():
    # Of 10 rounds, 4 had nothing to verify; 3 accepted both of two drafts, 2 one, 1 none.
    found = Acceptance.from_histogram([[4, 0, 0], [0, 0, 0], [1, 2, 3]])
    assert found.coverage == 0.6
    assert found.alpha == pytest.approx(8 / (8 + 3))
    assert Acceptance.from_histogram([[5]]) == Acceptance(alpha=0.0, coverage=0.0)
    with pytest.raises(ValueError, match="no round"):
        Acceptance.from_histogram([[0, 0], [0, 0]])


def test_acceptance_finds_the_alpha_that_made_the_counts():
    alpha, depth, rounds = 0.75, 6, 10**6
    row = [round(rounds * alpha**kept * (1 - alpha)) for kept in range(depth)]
    row.append(rounds - sum(row))
    histogram = [[0] * (depth + 1) for _ in range(depth)] + [row]
    assert Acceptance.from_histogram(histogram).alpha == pytest.approx(alpha, abs=1e-5)


def _estimates(*speed_ups):
    return [
        Estimate(num_drafts=k, tokens_per_round=speed, round_ms=10.0, baseline_ms=10.0)
        for k, speed in enumerate(speed_ups)
    ]


def test_the_fewest_drafts_that_are_as_good():
    assert best_depth(_estimates(1.0, 1.5, 1.995, 2.0)) == 2
    assert best_depth(_estimates(1.0, 1.5, 1.9, 2.0)) == 3
    assert best_depth(_estimates(1.0, 0.9)) == 0
    with pytest.raises(ValueError, match="no estimates"):
        best_depth([])


def test_the_table_joins_neighbours():
    assert depth_table([(1, 8), (2, 4), (4, 4), (8, 0)]) == [[1, 1, 8], [2, 4, 4], [5, 8, 0]]
    assert depth_table([(4, 3)]) == [[1, 4, 3]]
    with pytest.raises(ValueError, match="ascend"):
        depth_table([(2, 4), (1, 4)])


@pytest.mark.parametrize("value", [-0.1, 1.1, math.nan, math.inf])
def test_shares_outside_the_unit_interval_are_refused(value):
    for make in (lambda: expected_tokens(value, 4), lambda: Acceptance(alpha=value)):
        with pytest.raises(ValueError, match=r"alpha must be in \[0, 1\]"):
            make()
    with pytest.raises(ValueError, match=r"coverage must be in \[0, 1\]"):
        Acceptance(alpha=0.5, coverage=value)


@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf])
def test_times_that_are_none_are_refused(value):
    for name in ("draft_ms", "verify_ms", "state_ms"):
        with pytest.raises(ValueError, match=f"{name} must be a finite number of at least 0"):
            RoundCosts(**{"verify_ms": 1.0, name: value})
    with pytest.raises(ValueError, match="baseline_ms must be"):
        estimate(Acceptance(alpha=0.5), 1, baseline_ms=value, costs=RoundCosts(verify_ms=1.0))
    with pytest.raises(ValueError, match="verify_ms must be above 0"):
        RoundCosts(verify_ms=0.0)
    with pytest.raises(ValueError, match="num_drafts must be at least 0"):
        expected_tokens(0.5, -1)
