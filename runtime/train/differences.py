"""Tells in what two runs differ, by the flags of `draftgraph train`."""

from __future__ import annotations

from typing import Any

from ...model_zoo.training.checkpoints import Difference

_OPTION = "option "
_OWN_FLAGS = ("num_drafts", "num_layers")
"""Options of methods that have a flag of their own."""
_SWITCHES = ("drop_held_out", "learn_prompts")
_CONTENT = {
    "data": "what --data names is another, or its content has changed",
    "examples": "the examples that --data gives are others",
    "vocabulary": "the tokens that the head can draft are others",
}
"""What has no flag of its own, because it follows from others and from the data."""


def difference_text(difference: Difference) -> str:
    """One difference, as the user would change it."""
    name, was, now = difference.name, difference.was, difference.now
    if name in ("target", "init_from"):
        return _weights(difference)
    if name in _CONTENT:
        return _CONTENT[name]
    if name in _SWITCHES:
        return f"{_flag(name)} was {'given' if was else 'not given'} and is {'given' if now else 'not given'}"
    if name == "method":
        return f"the method was {was} and is {now}"
    if name == "bfloat16":
        return f"--dtype was {_dtype(was)} and is {_dtype(now)}"
    flag = _flag(name)
    if difference.only == "was":
        return f"{flag} was {_shown(was)}, and there is no such option now"
    if difference.only == "now":
        return f"{flag} is {_shown(now)}, and the run had no such option"
    return f"{flag} was {_shown(was)} and is {_shown(now)}"


def _weights(difference: Difference) -> str:
    flag, (was, now) = _flag(difference.name), difference.names
    if difference.was is None:
        return f"{flag} was not given and is {now or 'given'}"
    if difference.now is None:
        return f"{flag} was {was or 'given'} and is not given"
    if was is None or was == now:
        return f"{flag} names other weights than the run's{'' if now is None else f': {now}'}"
    return f"{flag} was {was} and is {now}, which are other weights"


def _flag(name: str) -> str:
    """`--option` with its name where an option has no flag of its own."""
    own = name.removeprefix(_OPTION)
    if name.startswith(_OPTION) and own not in _OWN_FLAGS:
        return f"--option {own}"
    return f"--{own.replace('_', '-')}"


def _dtype(bfloat16: Any) -> str:
    return "bfloat16" if bfloat16 else "float32"


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return ",".join(map(str, value))
    if value is None or isinstance(value, bool):
        return str(value).lower()
    return str(value)
