"""What the probe runs in a process of its own: a small loop through each executor of captured graphs."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence

import torch

from .executors import create_executor
from .probe import CHECKS
from .program import Program, Step, Switch, While
from .program import Sequence as InOrder
from .state import DecodeState, StateShape


def toy_loop(device: torch.device | str) -> tuple[Program, Callable[[], str | None]]:
    """A loop of two passes through two branches, and a check of what it leaves: None, or what is wrong with it."""
    shape = StateShape(slots=2, context=16, num_drafts=1, vocab_size=8, max_bucket=2, max_width=4)
    state = DecodeState.allocate(shape, dtype=torch.float32, device=device)

    def first(s: DecodeState) -> None:
        s.limit[0].add_(1)

    def second(s: DecodeState) -> None:
        s.limit[1].add_(10)

    def count(s: DecodeState) -> None:
        s.width_index.add_(1)
        torch.lt(s.width_index, 2, out=s.running)

    branches = Switch(state.width_index, (Step("first", first), Step("second", second)))
    program = Program("toy", While(state.running, InOrder(branches, Step("count", count))), state)

    def check() -> str | None:
        left = (*state.limit[:2].tolist(), int(state.width_index), bool(state.running))
        return None if left == (1, 10, 2, False) else f"a loop of two passes left {left}, not (1, 10, 2, False)"

    state.running.fill_(True)
    return program, check


def run_checks(names: Sequence[str], check: Callable[[str], str | None], say: Callable[[str], None]) -> None:
    """Tries one executor after another, and says after each, in a line of JSON, how it went.

    Args:
        names: of executors.
        check: tries one; returns what is wrong, or None.
        say: takes the lines.
    """
    for name in names:
        try:
            wrong = check(name)
        except Exception as error:
            text = " ".join(str(error).split())
            wrong = f"{type(error).__name__}: {text}" if text else type(error).__name__
        reason = "a small loop ran as captured graphs" if wrong is None else f"a small loop failed: {wrong}"
        say(json.dumps({"check": name, "works": wrong is None, "reason": reason}))


def main(index: int) -> None:
    """Runs the checks on a device and prints their lines."""
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)

    def check(name: str) -> str | None:
        program, verdict = toy_loop(device)
        for _ in create_executor(name, device).rounds(program):
            pass
        torch.cuda.synchronize(device)
        return verdict()

    run_checks(CHECKS, check, lambda line: print(line, flush=True))


if __name__ == "__main__":
    main(int(sys.argv[1]))
