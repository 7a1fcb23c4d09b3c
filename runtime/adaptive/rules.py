"""Which round's confidences the size of a budget may depend on without changing what is emitted."""

from __future__ import annotations

from dataclasses import dataclass

from ..verification import VerificationPolicy


@dataclass(frozen=True)
class BudgetRule:
    """What a budget is decided from.

    Where drafts are sampled, the drafter's confidence at a position depends on the drafts before it. A rule that looks
    at all of a round's confidences and then says how many drafts are verified thus picks among the drafts, and the
    text no longer has the target's distribution. Sharing a given budget by `budget_topk` never does that: whether
    draft n of a row is verified depends on confidences up to n, and those on the drafts before n alone.
    """

    name: str
    """As metrics show it."""
    sees_drafts: bool
    """Whether the number of drafts made and verified depends on confidences of the very round."""


CURRENT_ROUND = BudgetRule("current round", sees_drafts=True)
PREVIOUS_ROUNDS = BudgetRule("previous rounds", sees_drafts=False)


def lawful_rule(policy: VerificationPolicy, *, samples_drafts: bool, confidence_reads_drafts: bool) -> BudgetRule:
    """The rule that sees most of those that keep what `policy` promises.

    Args:
        policy: how drafts are judged.
        samples_drafts: whether drafts are sampled; else each is the only one that its drafter would have made, and
            what follows from it is known before it is drafted.
        confidence_reads_drafts: whether the confidence at a position depends on the drafts before it, as it does
            unless all drafts come from one pass.
    """
    if policy.allows_any_budget or not samples_drafts or not confidence_reads_drafts:
        return CURRENT_ROUND
    return PREVIOUS_ROUNDS
