"""One sequence on its way through the engine, as the host sees it."""

from __future__ import annotations

import enum
import itertools
import time
from dataclasses import dataclass, field

from .detokenizer import IncrementalDetokenizer
from .outputs import GenerationResult, StreamChunk
from .sampling_params import SamplingParams

_numbers = itertools.count()


class Phase(enum.Enum):
    """Where a request stands."""

    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"
    DONE = "done"


@dataclass(eq=False)
class Request:
    """A sequence: its prompt, its parameters, and what it has emitted so far."""

    prompt_ids: tuple[int, ...]
    params: SamplingParams
    seed: int
    """The key of its random numbers: the user's seed, or one drawn for it, varied by `index`."""
    index: int
    """Which of the prompt's `n` samples it is."""
    limit: int
    """The length, prompt included, at which it finishes with reason `length`."""
    stop_token_ids: tuple[int, ...]
    detokenizer: IncrementalDetokenizer
    synthetic: bool = False
    """Its drafts are accepted at given rates, for a benchmark."""

    number: int = field(default_factory=_numbers.__next__)
    """Tells the requests of a process apart."""
    phase: Phase = Phase.WAITING
    slot: int = -1
    prefilled: int = 0
    """Prompt tokens whose KV is written."""
    reused: int = 0
    """Prompt tokens whose KV was already in the slot."""
    token_ids: list[int] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    chunks: list[StreamChunk] = field(default_factory=list)
    """Chunks that no stream has taken yet."""
    submitted_at: float = field(default_factory=time.perf_counter)
    arrivals: list[tuple[float, int]] = field(default_factory=list)
    """When tokens arrived, and how many came together."""
    result: GenerationResult | None = None

    @property
    def prefill_target(self) -> int:
        """Prompt tokens to prefill: all but the last, which is the anchor of the first round."""
        return len(self.prompt_ids) - 1

    @property
    def cached_tokens(self) -> tuple[int, ...]:
        """The tokens whose KV the slot holds: the anchor's is not yet written."""
        if self.phase is Phase.DECODE:
            return (*self.prompt_ids, *self.token_ids)[:-1]
        return self.prompt_ids[: self.prefilled]
