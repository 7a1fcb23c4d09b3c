"""How long the host sleeps between two looks."""

from __future__ import annotations

import pytest

from draftgraph.graphs.backoff import LEAST_SLEEP, MOST_SLEEP, SHARE, SPIN_SECONDS, Backoff


class Clock:
    """Stands still but for sleeping, and for a microsecond per look."""

    def __init__(self) -> None:
        self.now = 0.0
        self.sleeps: list[float] = []

    def __call__(self) -> float:
        self.now += 1e-6
        return self.now

    def sleep(self, seconds: float) -> None:
        self.sleeps.append(seconds)
        self.now += seconds


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_it_spins_first_and_then_sleeps_ever_longer_up_to_a_bound(clock):
    backoff = Backoff(clock, clock.sleep)
    while clock.now < 0.2:
        backoff.pause()
    spins = [s for s in clock.sleeps if s == 0.0]
    sleeps = clock.sleeps[len(spins) :]
    assert clock.sleeps[: len(spins)] == spins
    assert len(spins) == pytest.approx(SPIN_SECONDS / 1e-6, abs=2)
    assert sleeps == sorted(sleeps)
    assert sleeps[0] == LEAST_SLEEP
    assert sleeps[-1] == MOST_SLEEP


@pytest.mark.parametrize("news", [30e-6, 250e-6, 2e-3, 20e-3, 500e-3])
def test_news_is_seen_late_by_a_small_share_of_the_wait(clock, news):
    backoff = Backoff(clock, clock.sleep)
    while clock.now < news:
        backoff.pause()
    assert clock.now - news <= max(news * SHARE, LEAST_SLEEP) + 2e-6
    assert clock.now - news <= MOST_SLEEP + 2e-6


def test_reset_makes_the_looks_close_again(clock):
    backoff = Backoff(clock, clock.sleep)
    while clock.now < 0.1:
        backoff.pause()
    assert clock.sleeps[-1] == MOST_SLEEP
    backoff.reset()
    backoff.pause()
    assert clock.sleeps[-1] == 0.0
