"""Runs steps where nothing depends on them: on padding rows, with the decode state put back afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from .state import DecodeState

_HOST_WRITES = frozenset({"cancel", "pause", "leave_on_finish", "taken"})
"""Steps only read these, and the host may write them meanwhile: putting back an old value would undo that."""


@contextmanager
def parked(state: DecodeState) -> Iterator[None]:
    """Inside, every row is a padding row and the prefill chunk is empty; afterwards the state is as before.

    So a step may run to be compiled, warmed up or captured in the middle of anything. What steps keep outside the
    state (the KV cache, a drafter's index) they write at the row's slot, which is the reserved one, that nobody reads.
    """
    with torch.inference_mode():
        kept = {name: tensor.clone() for name, tensor in state.tensors().items() if name not in _HOST_WRITES}
        state.slot_of_row.fill_(state.reserved_slot)
        state.prefill_slot.fill_(state.reserved_slot)
        state.prefill_range.zero_()
        try:
            yield
        finally:
            for name, tensor in state.tensors().items():
                if name in kept:
                    tensor.copy_(kept[name])
