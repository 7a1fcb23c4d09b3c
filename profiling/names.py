"""What programs and steps are called, in profiles and in the tables made from them.

A program is named `round[bucket]` or `prefill[width]`, a step by its phase, `propose`, or by its phase and width,
`verify[8]`. A range in a profile is named `program` or `program step`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

ROUND = "round"
PREFILL = "prefill"
DOMAIN = "draftgraph"
"""The NVTX domain of all ranges."""

_NAME = re.compile(r"(?P<kind>[^\[\]\s]+)(?:\[(?P<size>\d+)\])?")


@dataclass(frozen=True)
class StepName:
    """A step of a program; the program's own pass where `step` is empty."""

    program: str
    """`round[bucket]` or `prefill[width]`."""
    step: str
    """As the program calls it, such as `verify[8]`; empty for the whole pass."""

    def __str__(self) -> str:
        return f"{self.program} {self.step}" if self.step else self.program

    @classmethod
    def parse(cls, text: str) -> StepName:
        """Reads the name of a pass or step; raises `ValueError` for a text that is none."""
        program, _, step = text.partition(" ")
        if _split(program)[1] is None or (step and _NAME.fullmatch(step) is None):
            raise ValueError(f"{text!r} names no pass or step: 'program[size]' or 'program[size] step' is expected")
        return cls(program, step)

    @property
    def is_round(self) -> bool:
        """Whether the program is a decoding round, and not a prefill."""
        return _split(self.program)[0] == ROUND

    @property
    def phase(self) -> str:
        """The step without its width: propose, budget, verify, accept, logprobs, commit, prefill; empty for a pass."""
        return _split(self.step)[0] if self.step else ""

    @property
    def bucket(self) -> int | None:
        """Rows of the round; None for a prefill."""
        return _split(self.program)[1] if self.is_round else None

    @property
    def width(self) -> int | None:
        """Token positions of a verify or prefill; None for the other steps and for the pass of a round."""
        if self.step:
            return _split(self.step)[1]
        return None if self.is_round else _split(self.program)[1]


def _split(name: str) -> tuple[str, int | None]:
    match = _NAME.fullmatch(name)
    if match is None:
        return name, None
    return match["kind"], None if match["size"] is None else int(match["size"])
