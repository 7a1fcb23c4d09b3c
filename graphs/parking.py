"""Runs steps where nothing depends on them: on padding rows, with the decode state put back afterwards."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from .state import DecodeState


@contextmanager
def parked(state: DecodeState) -> Iterator[None]:
    """Inside, every row is a padding row and the prefill chunk is empty; afterwards the state is as before.

    So a step may run to be compiled, warmed up or captured in the middle of anything. What steps keep outside the
    state (the KV cache, a drafter's index) they write at the row's slot, which is the reserved one, that nobody reads.
    The memory shared with the host is left alone: the host may write its part meanwhile, and steps publish live rows
    only.
    """
    shared = {field.name for field in dataclasses.fields(state.host)}
    own = {name: tensor for name, tensor in state.tensors().items() if name not in shared}
    with torch.inference_mode():
        kept = {name: tensor.clone() for name, tensor in own.items()}
        state.slot_of_row.fill_(state.reserved_slot)
        state.prefill_slot.fill_(state.reserved_slot)
        state.prefill_range.zero_()
        try:
            yield
        finally:
            for name, tensor in own.items():
                tensor.copy_(kept[name])
