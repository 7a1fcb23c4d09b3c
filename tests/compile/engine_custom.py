"""A user's drafting class, for the sweep of what an engine launches: what surrounds it is the engine's."""

from __future__ import annotations

from draftgraph.graphs import DecodeState
from draftgraph.runtime.speculators import BaseSpeculator


class NoDrafts(BaseSpeculator):
    """Has none for any row, and launches nothing of its own."""

    def allocate(self, state: DecodeState) -> None:
        """Keeps nothing."""

    def propose(self, state: DecodeState, bucket: int) -> None:
        """Proposes none."""
        state.draft_count.zero_()
