"""What speculation is worth on paper, from an acceptance rate and the costs of its parts."""

from __future__ import annotations


def expected_tokens(acceptance: float, num_drafts: int) -> float:
    """Mean tokens of a round, `(1 - a**(K + 1)) / (1 - a)` (Leviathan et al. 2023, equation 1).

    Args:
        acceptance: a, the chance in [0, 1] that a draft is accepted given that those before it are.
        num_drafts: K.
    """
    if acceptance == 1.0:
        return num_drafts + 1.0
    return float((1.0 - acceptance ** (num_drafts + 1)) / (1.0 - acceptance))


def expected_speedup(
    acceptance: float, num_drafts: int, *, draft_cost: float, verify_cost: float = 1.0, state_cost: float = 0.0
) -> float:
    """How much faster than plain decoding; below 1 it is slower.

    Args:
        acceptance: see `expected_tokens`.
        num_drafts: K.
        draft_cost: of one draft, in plain target passes.
        verify_cost: of one verify, in plain target passes.
        state_cost: of whatever else a round does, in plain target passes.
    """
    cost = num_drafts * draft_cost + verify_cost + state_cost
    return expected_tokens(acceptance, num_drafts) / cost
