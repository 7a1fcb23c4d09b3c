"""A small round and prefill that run without a model."""

from __future__ import annotations

import torch

from draftgraph.graphs import DecodeState, HostExecutor, Program, Sequence, StateShape, Step, Switch, While
from draftgraph.profiling import Observer

SHAPE = StateShape(slots=2, context=32, num_drafts=3, vocab_size=11, max_bucket=2, max_width=8)


def run_rounds(observer: Observer | None, rounds: int = 3) -> None:
    """A prefill of 64, then rounds of bucket 2 whose verify is 4, 8, 4, ... positions wide."""
    state = DecodeState.allocate(SHAPE, dtype=torch.float32, device="cpu")
    left = [rounds]

    def multiply(s: DecodeState) -> None:
        torch.mm(torch.ones(16, 16), torch.ones(16, 16))

    def commit(s: DecodeState) -> None:
        left[0] -= 1
        s.width_index.fill_(1 - int(s.width_index))
        s.running.fill_(left[0] > 0)

    state.running.fill_(True)
    verify = Switch(state.width_index, (Step("verify[4]", multiply), Step("verify[8]", multiply)))
    body = Sequence(Step("propose", multiply), verify, Step("commit", commit))
    executor = HostExecutor(observer)
    executor.run(Program("prefill[64]", Step("prefill[64]", multiply), state))
    assert len(list(executor.rounds(Program("round[2]", While(state.running, body), state)))) == rounds


CALLS = {
    "prefill[64]": 1,
    "prefill[64] prefill[64]": 1,
    "round[2]": 3,
    "round[2] propose": 3,
    "round[2] verify[4]": 2,
    "round[2] verify[8]": 1,
    "round[2] commit": 3,
}
"""What `run_rounds` gives a table of, in order."""
