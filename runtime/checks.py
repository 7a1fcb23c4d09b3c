"""Type and range checks of option values, with the messages that a user reads."""

from __future__ import annotations

import math
from typing import Any

from .errors import DraftgraphError


def check_integer(error: type[DraftgraphError], name: str, value: Any, low: int, high: int | None = None) -> None:
    """Raises `error` unless `value` is an integer from `low` to `high`, both included; a bool is none."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise error(f"{name} must be an integer, got {value!r}")
    if value < low or (high is not None and value > high):
        accepted = f"at least {low}" if high is None else f"from {low} to {high}"
        raise error(f"{name} must be {accepted}, got {value}")


def check_number(
    error: type[DraftgraphError],
    name: str,
    value: Any,
    low: float,
    high: float = math.inf,
    *,
    low_included: bool = True,
) -> None:
    """Raises `error` unless `value` is a finite number in [low, high], or in (low, high]."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or not low <= value <= high or (value == low and not low_included):
        least = "of at least" if low_included else "above"
        left = "[" if low_included else "("
        accepted = f"in {left}{low:g}, {high:g}]" if high < math.inf else f"a finite number {least} {low:g}"
        raise error(f"{name} must be {accepted}, got {value!r}")


def check_bool(error: type[DraftgraphError], name: str, value: Any) -> None:
    """Raises `error` unless `value` is True or False."""
    if not isinstance(value, bool):
        raise error(f"{name} must be true or false, got {value!r}")


def check_choice(error: type[DraftgraphError], name: str, value: Any, accepted: tuple[str, ...]) -> None:
    """Raises `error` unless `value` is one of `accepted`."""
    if value not in accepted:
        raise error(f"{name} must be one of {', '.join(map(repr, accepted))}, got {value!r}")
