"""How many drafts a round makes and verifies: by depth alone, or by what they are expected to be worth."""

from .budget import Budget, FixedBudget
from .budgeter import AdaptiveBudget
from .costs import BucketCosts, CostTable
from .rules import CURRENT_ROUND, PREVIOUS_ROUNDS, BudgetRule, lawful_rule

__all__ = [
    "CURRENT_ROUND",
    "PREVIOUS_ROUNDS",
    "AdaptiveBudget",
    "BucketCosts",
    "Budget",
    "BudgetRule",
    "CostTable",
    "FixedBudget",
    "lawful_rule",
]
