"""The programs of a round, loaded with the fixed prompt, so that single steps can be traced or timed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ...graphs import (
    DecodeState,
    HostExecutor,
    Program,
    StateShape,
    Step,
    bucket_for,
    eager_region,
    prefill_widths,
    verify_widths,
)
from ...model_zoo.decoder import DecoderModel, DecoderWeights
from ..rounds import RoundBuilder
from ..speculative_config import SpeculativeConfig
from ..speculators import create_speculator
from ..verification import create_policy
from .fixed_model import CONFIG, CONTEXT, PROMPT


@dataclass(frozen=True)
class Rig:
    """The round of one bucket, what it works on, and its prefill."""

    round: Program
    prefill: Program
    state: DecodeState

    def step(self, name: str) -> Step:
        """The round's step called `name`; raises `KeyError` when it has none."""
        for step in self.round.steps():
            if step.name == name:
                return step
        raise KeyError(f"{self.round.name} has no step {name!r}: {[step.name for step in self.round.steps()]}")

    def copy_from(self, other: Rig) -> None:
        """Takes over the decode state of a rig of the same shapes, though not its keys and values."""
        theirs = other.state.tensors()
        for name, tensor in self.state.tensors().items():
            tensor.copy_(theirs[name])

    def load(self, *, rounds: int = 0, temperature: float = 0.0) -> None:
        """Puts the fixed prompt into every slot, prefills it, and runs a few rounds of decoding."""
        state, executor = self.state, HostExecutor()
        for slot in range(state.shape.slots):
            state.tokens[slot, : len(PROMPT)] = torch.tensor(PROMPT, dtype=torch.int32)
            state.length[slot] = len(PROMPT)
            state.limit[slot] = CONTEXT
            state.temperature[slot] = temperature
            state.top_p[slot] = 1.0
            state.seed[slot] = slot
            state.slot_of_row[slot] = slot
            state.prefill_slot.fill_(slot)
            state.prefill_range.copy_(torch.tensor([0, len(PROMPT) - 1], dtype=torch.int32))
            executor.run(self.prefill)
            state.finished[slot] = False
        state.running.fill_(True)
        state.rounds_left.fill_(2**30)
        passes = executor.rounds(self.round)
        for _ in range(rounds):
            next(passes)
        passes.close()


def make_rig(
    speculation: SpeculativeConfig,
    weights: DecoderWeights,
    *,
    bucket: int = 1,
    compile_region: Callable[..., Any] = eager_region,
) -> Rig:
    """A rig of `bucket` slots and rows on the fixed model's shapes; its device and type are those of `weights`."""
    depth = speculation.num_speculative_tokens or 0
    widths = verify_widths(bucket, depth)
    device, dtype = weights.embedding.device, weights.embedding.dtype
    model = DecoderModel(CONFIG, weights, compile_region=compile_region)
    shape = StateShape(
        slots=bucket,
        context=CONTEXT,
        num_drafts=depth,
        vocab_size=CONFIG.vocab_size,
        max_bucket=bucket,
        max_width=widths[-1],
    )
    state = DecodeState.allocate(shape, dtype=dtype, device=device)
    state.draft_limit.fill_(depth)
    speculator = create_speculator(speculation)
    if speculator is not None:
        speculator.allocate(state)
    cache = model.allocate_cache(bucket + 1, CONTEXT)
    policy = create_policy(speculation)
    policy.allocate(state)
    builder = RoundBuilder(model, cache, state, speculator, policy)
    prefill = builder.prefill(bucket_for(len(PROMPT) - 1, prefill_widths(False)))
    return Rig(builder.round(bucket, widths), prefill, state)
