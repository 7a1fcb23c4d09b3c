"""torch.profiler on the CPU: the same table as the timer's, and a trace that names its steps."""

from __future__ import annotations

import json

from observed_rounds import CALLS, run_rounds

from draftgraph.profiling import Observers, StepTimer
from draftgraph.profiling.torch_trace import TorchTrace


def test_the_table_and_the_trace(tmp_path):
    timer = StepTimer("cpu")
    with TorchTrace() as recorded:
        run_rounds(Observers(timer, recorded))
    table = recorded.table()
    assert {str(row.name): row.calls for row in table} == CALLS
    assert [row.name for row in table] == [row.name for row in timer.table()]
    for row in table:
        assert 0.0 < row.seconds < 60.0
        assert row.kernel_seconds is None
    seconds = {str(row.name): row.seconds for row in table}
    steps = sum(seconds[f"round[2] {step}"] for step in ("propose", "verify[4]", "verify[8]", "commit"))
    assert steps <= seconds["round[2]"]

    recorded.save(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = [event.get("name") for event in events if event.get("ph") == "X"]
    assert names.count("draftgraph:round[2] verify[4]") == 2
    assert names.count("aten::mm") == 7
