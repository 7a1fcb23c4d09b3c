"""A drafting method that a user wrote: found by its name, and refused before any weight is read if it cannot work."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Sequence
from functools import partial
from importlib.metadata import entry_points

import torch

from ...graphs import DecodeState, StateShape
from ...graphs.capture_guard import CaptureError, check_function, fake_cuda
from ...kernels.drop_unknown_drafts import drop_unknown_drafts
from ...kernels.window import Window
from ..errors import ConfigError
from .base import BaseSpeculator

ENTRY_POINTS = "draftgraph.speculators"
"""The group of entry points whose names may stand in place of an import path."""


def speculator_class(path: str) -> type[BaseSpeculator]:
    """The class that a configuration names.

    Args:
        path: "package.module:Class", or the name of an entry point of the group `draftgraph.speculators`.

    Raises:
        ConfigError: it cannot be imported, or is not a subclass of `BaseSpeculator` that can be made.
    """
    found = _imported(path)
    if not (inspect.isclass(found) and issubclass(found, BaseSpeculator)):
        raise ConfigError(f"speculator {path!r} is {found!r}; accepted: a subclass of draftgraph.BaseSpeculator")
    missing = sorted(getattr(found, "__abstractmethods__", ()))
    if missing:
        raise ConfigError(f"speculator {path!r} does not define {', '.join(missing)}")
    return found


def create_custom(path: str, num_speculative_tokens: int) -> BaseSpeculator:
    """Makes one; raises `ConfigError` where `speculator_class` does, or when its constructor fails."""
    kind = _keeping_to_the_vocabulary(speculator_class(path))
    try:
        return kind(num_speculative_tokens)
    except Exception as error:
        raise ConfigError(
            f"speculator {path!r} cannot be made with num_speculative_tokens = {num_speculative_tokens}: {_said(error)}"
        ) from error


def _keeping_to_the_vocabulary(kind: type[BaseSpeculator]) -> type[BaseSpeculator]:
    """The class, with drafts that are no token of the target's made no proposals: the target would look them up."""

    def propose(self: BaseSpeculator, state: DecodeState, bucket: int) -> None:
        kind.propose(self, state, bucket)
        drop_unknown_drafts(state.draft_tokens, state.slot_of_row[:bucket], state.shape.vocab_size)

    return type(kind.__name__, (kind,), {"propose": propose, "__module__": kind.__module__, "__doc__": kind.__doc__})


def check_custom(
    path: str,
    shape: StateShape,
    *,
    hidden_size: int,
    num_layers: int,
    dtype: torch.dtype,
    buckets: Sequence[int],
) -> None:
    """Runs every step of a class once on fake CUDA tensors, where nothing is computed and no GPU is needed.

    Args:
        path: as `speculator_class` takes it.
        shape: of the engine's state.
        hidden_size: the target's.
        num_layers: the target's.
        dtype: of the target.
        buckets: batch sizes.

    Raises:
        ConfigError: the class cannot be made there, a CUDA graph could not hold one of its steps, which the message
            names, or it asks for layers that the target has not.
    """
    speculator_class(path)
    with fake_cuda() as device:
        state = DecodeState.allocate(shape, dtype=dtype, device=device)
        speculator = create_custom(path, shape.num_drafts)
        try:
            speculator.allocate(state)
        except Exception as error:
            raise ConfigError(
                f"speculator {path!r} cannot be allocated on fake CUDA tensors, where its steps are checked: "
                f"{_said(error)}; accepted: tensors made on state.device, no values read"
            ) from error
        try:
            for bucket in buckets:
                check_function(f"propose[{bucket}]", partial(speculator.propose, state, bucket))
                check_function(f"commit[{bucket}]", partial(speculator.commit, state, bucket))
            window = _chunk(device)
            hidden = torch.empty(window.tokens.shape[0], hidden_size, dtype=dtype, device=device)
            check_function("prefill", lambda: speculator.prefill(state, window, hidden))
            check_function("verify_hidden", lambda: speculator.verify_hidden(state, window))
            _check_layers(path, speculator, num_layers)
            if speculator.target_states:
                states = (hidden,) * len(speculator.target_states)
                check_function("observe", lambda: speculator.observe(state, window, states))
                check_function("observe_prompt", lambda: speculator.observe_prompt(state, window, states))
        except CaptureError as error:
            raise ConfigError(f"speculator {path!r}: {error}") from error


def _check_layers(path: str, speculator: BaseSpeculator, num_layers: int) -> None:
    wrong = [state for state in speculator.target_states if not 0 <= state <= num_layers]
    if wrong:
        raise ConfigError(
            f"speculator {path!r} reads the target's hidden states {list(speculator.target_states)}; accepted: 0 to "
            f"{num_layers}"
        )
    if not 0 <= speculator.first_layer <= num_layers:
        raise ConfigError(
            f"speculator {path!r} has first_layer {speculator.first_layer}; accepted: 0 to {num_layers}, the target's "
            "layers"
        )


def _imported(path: str) -> object:
    """What `path` names."""
    if ":" not in path:
        named = entry_points(group=ENTRY_POINTS)
        if path not in named.names:
            known = ", ".join(sorted(named.names)) or "none are installed"
            raise ConfigError(
                f"speculator {path!r} is neither 'package.module:Class' nor an entry point of the group "
                f"{ENTRY_POINTS} ({known})"
            )
        try:
            return named[path].load()
        except Exception as error:
            raise ConfigError(f"speculator {path!r}, an entry point, does not import: {_said(error)}") from error
    module, _, name = path.partition(":")
    try:
        found = importlib.import_module(module)
    except Exception as error:
        absent = isinstance(error, ModuleNotFoundError) and error.name == module.partition(".")[0]
        hint = "; PYTHONPATH tells Python where else to look, PYTHONPATH=. in this folder" if absent else ""
        raise ConfigError(f"speculator {path!r} does not import: {_said(error)}{hint}") from error
    if not hasattr(found, name):
        raise ConfigError(f"speculator {path!r} does not import: the module {module} has no {name!r}")
    return getattr(found, name)


def _chunk(device: torch.device, width: int = 16) -> Window:
    """A window of one row, without content."""
    tokens = torch.zeros(width, dtype=torch.int32, device=device)
    ends = torch.zeros(2, dtype=torch.int32, device=device)
    row = torch.zeros(1, dtype=torch.int32, device=device)
    return Window(tokens, tokens, tokens, tokens, ends, row, row)


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]
