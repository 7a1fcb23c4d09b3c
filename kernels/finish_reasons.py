"""Why a row finished, as numbers, and where they stand in the word that is published."""

from __future__ import annotations

# The codes of `graphs/state.py`, which this package may not import; a test holds them equal.
FINISH_NONE = 0
FINISH_STOP = 1
FINISH_LENGTH = 2
FINISH_CANCELLED = 3
FINISH_ERROR = 4
REASON_SHIFT = 56
