"""A method's options as a user gives them: names and texts, checked against the method's dataclass."""

from __future__ import annotations

import ast
import dataclasses
import difflib
import inspect
import textwrap
import types
import typing
from collections.abc import Mapping
from typing import Any

from ..errors import TrainingConfigError


@dataclasses.dataclass(frozen=True)
class OptionField:
    """One option."""

    name: str
    kind: Any
    """Its annotated type."""
    default: Any
    meaning: str
    """The text under the field."""


def option_fields(options: type) -> dict[str, OptionField]:
    """The fields of an options dataclass, in their order."""
    kinds = typing.get_type_hints(options)
    meanings: dict[str, str] = {}
    for part in reversed(options.__mro__):
        if dataclasses.is_dataclass(part):
            meanings |= _meanings(part)
    return {
        field.name: OptionField(field.name, kinds[field.name], field.default, meanings.get(field.name, ""))
        for field in dataclasses.fields(options)
    }


def describe_options(options: type) -> str:
    """All options with defaults and meanings, on one line."""
    return "; ".join(
        f"{field.name}={_shown(field.default)}: {field.meaning.rstrip('.')}"
        for field in option_fields(options).values()
    )


def make_options(method: str, options: type, given: Mapping[str, Any]) -> Any:
    """An options object from texts as `--option name=value` gives them, or values of the right type.

    Args:
        method: for messages.
        options: the dataclass.
        given: by name. None, true and false are written so; lists with commas between.

    Raises:
        TrainingConfigError: an unknown name, or a value that is none of its type or out of range.
    """
    fields = option_fields(options)
    values: dict[str, Any] = {}
    for name, value in given.items():
        if name not in fields:
            close = difflib.get_close_matches(name, fields, n=1, cutoff=0.5)
            hint = f" (did you mean {close[0]!r}?)" if close else ""
            raise TrainingConfigError(
                f"{method} has no option {name!r}{hint}; its options: {describe_options(options)}"
            )
        values[name] = _parsed(method, fields[name], value) if isinstance(value, str) else value
    try:
        return options(**values)
    except ValueError as error:
        raise TrainingConfigError(f"options of {method}: {error}") from None


def _parsed(method: str, field: OptionField, text: str) -> Any:
    accepted = typing.get_args(field.kind) if isinstance(field.kind, types.UnionType) else (field.kind,)
    for kind in accepted:
        try:
            return _read(kind, text.strip())
        except ValueError:
            continue
    names = " or ".join(_kind_name(kind) for kind in accepted)
    raise TrainingConfigError(f"option {field.name} of {method} must be {names}, got {text!r}: {field.meaning}")


def _read(kind: Any, text: str) -> Any:
    """Raises `ValueError` where the text is none of that kind."""
    if kind is types.NoneType:
        if text.lower() != "none":
            raise ValueError(text)
        return None
    if kind is bool:
        if text.lower() not in ("true", "false"):
            raise ValueError(text)
        return text.lower() == "true"
    if typing.get_origin(kind) is tuple:
        inner = typing.get_args(kind)[0]
        found = tuple(_read(inner, part.strip()) for part in text.strip("()[]").split(",") if part.strip())
        if not found:
            raise ValueError("an empty list")
        return found
    return kind(text)


def _kind_name(kind: Any) -> str:
    if typing.get_origin(kind) is tuple:
        plural = {int: "integers", float: "numbers"}.get(typing.get_args(kind)[0], "values")
        return f"{plural} with commas between"
    names = {int: "an integer", float: "a number", bool: "true or false", str: "a text", types.NoneType: "none"}
    return names.get(kind, str(kind))


def _shown(value: Any) -> str:
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


def _meanings(options: type) -> dict[str, str]:
    """The text under each field of a class's own."""
    body = ast.parse(textwrap.dedent(inspect.getsource(options))).body[0]
    assert isinstance(body, ast.ClassDef)
    found: dict[str, str] = {}
    for field, text in zip(body.body, body.body[1:], strict=False):
        if not isinstance(field, ast.AnnAssign) or not isinstance(field.target, ast.Name):
            continue
        if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
            found[field.target.id] = " ".join(str(text.value.value).split())
    return found
