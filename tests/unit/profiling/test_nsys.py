"""The nsys script's command lines, and its parsers on recordings written for the purpose."""

from __future__ import annotations

import shlex
import sqlite3
import sys

import pytest
import typer
from typer.testing import CliRunner

from draftgraph.profiling import nsys
from draftgraph.profiling.nsys_stats import read_csv, read_sqlite, read_stats

COMMAND = ["draftgraph", "generate", "smollm2-135m", "Why is the sky blue?"]

# The layout is that of the exports of Nsight Systems 2023 to 2025, without the columns that nothing here reads.
SCHEMA = """
CREATE TABLE StringIds (id INTEGER NOT NULL PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE NVTX_EVENTS (
    start INTEGER NOT NULL, end INTEGER, eventType INTEGER NOT NULL, rangeId INTEGER, category INTEGER,
    color INTEGER, text TEXT, globalTid INTEGER, endGlobalTid INTEGER, textId INTEGER, domainId INTEGER
);
CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (
    start INTEGER NOT NULL, end INTEGER NOT NULL, eventClass INTEGER NOT NULL, globalTid INTEGER,
    correlationId INTEGER, nameId INTEGER NOT NULL, returnValue INTEGER NOT NULL
);
CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (
    start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL, contextId INTEGER NOT NULL,
    streamId INTEGER NOT NULL, correlationId INTEGER, globalPid INTEGER, demangledName INTEGER NOT NULL,
    shortName INTEGER NOT NULL
);
"""
PROCESS, OTHER_PROCESS = 0x1_0000_0A00_0000, 0x1_0000_0B00_0000
THREAD, OTHER_THREAD = PROCESS | 0x0A00, PROCESS | 0x0A01


class Recording:
    """An SQLite export in the making."""

    def __init__(self, path) -> None:
        self.path = path
        self.database = sqlite3.connect(path)
        self.database.executescript(SCHEMA)
        self._strings: dict[str, int] = {}
        self._correlation = 0

    def string(self, value: str) -> int:
        if value not in self._strings:
            self._strings[value] = len(self._strings) + 1
            self.database.execute("INSERT INTO StringIds VALUES (?, ?)", (self._strings[value], value))
        return self._strings[value]

    def domain(self, number: int, name: str, thread: int = THREAD) -> None:
        self.database.execute(
            "INSERT INTO NVTX_EVENTS (start, eventType, text, globalTid, domainId) VALUES (0, 75, ?, ?, ?)",
            (name, thread, number),
        )

    def range(self, start, end, message, *, domain=1, thread=THREAD, kind=59, registered=True) -> None:
        text, text_id = (None, self.string(message)) if registered else (message, None)
        self.database.execute(
            "INSERT INTO NVTX_EVENTS (start, end, eventType, text, globalTid, textId, domainId) "
            "VALUES (?, ?, ?, ?, ?, ?, ?)",
            (start, end, kind, text, thread, text_id, domain),
        )

    def launch(self, at, durations, *, thread=THREAD) -> None:
        """One call at a time that starts kernels: one, or a graph of several."""
        self._correlation += 1
        name = self.string("cudaGraphLaunch_v10000" if len(durations) > 1 else "cudaLaunchKernel_v7000")
        self.database.execute(
            "INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (?, ?, 0, ?, ?, ?, 0)",
            (at, at + 5, thread, self._correlation, name),
        )
        for duration in durations:
            kernel = self.string("a_kernel")
            self.database.execute(
                "INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (?, ?, 0, 1, 7, ?, ?, ?, ?)",
                (at + 1000, at + 1000 + duration, self._correlation, thread & ~0xFFFFFF, kernel, kernel),
            )

    def close(self):
        self.database.commit()
        self.database.close()
        return self.path


@pytest.fixture
def recording(tmp_path) -> Recording:
    return Recording(tmp_path / "run.sqlite")


def rows_of(table):
    return {str(row.name): (row.calls, row.seconds, row.kernels, row.kernel_seconds) for row in table}


def test_kernels_belong_to_the_step_that_launched_them(recording):
    recording.domain(1, "draftgraph")
    recording.range(0, 1000, "round[1]")
    recording.range(10, 100, "round[1] propose")
    recording.range(100, 800, "round[1] verify[8]")
    recording.range(2000, 2600, "round[1]")
    recording.range(2100, 2500, "round[1] verify[4]", registered=False)
    recording.launch(20, [7])
    recording.launch(150, [100])
    recording.launch(799, [50])  # begun at the last moment, and running long after the range
    recording.launch(800, [9])  # in the round, but in no step
    recording.launch(1500, [1000])  # between the rounds
    recording.launch(2200, [10, 20, 30])  # a graph
    recording.launch(300, [77], thread=OTHER_THREAD)
    table = read_stats(recording.close())
    ns = 1e-9
    assert rows_of(table) == {
        "round[1]": (2, pytest.approx(1600 * ns), 7, pytest.approx(226 * ns)),
        "round[1] propose": (1, pytest.approx(90 * ns), 1, pytest.approx(7 * ns)),
        "round[1] verify[4]": (1, pytest.approx(400 * ns), 3, pytest.approx(60 * ns)),
        "round[1] verify[8]": (1, pytest.approx(700 * ns), 2, pytest.approx(150 * ns)),
    }
    assert list(rows_of(table)) == ["round[1]", "round[1] propose", "round[1] verify[4]", "round[1] verify[8]"]


def test_other_domains_processes_and_kinds_of_ranges_are_left_out(recording):
    recording.domain(1, "draftgraph")
    recording.domain(2, "NCCL")
    recording.domain(1, "theirs", thread=OTHER_PROCESS)
    recording.range(0, 100, "round[1]")
    recording.range(0, 900, "round[1]", domain=2)
    recording.range(0, 900, "round[1]", domain=0)
    recording.range(0, 900, "round[1]", thread=OTHER_PROCESS)
    recording.range(0, 900, "steady", kind=60)
    recording.range(0, 900, "request 3, 12 prompt tokens", kind=60)
    recording.range(500, None, "round[1]")  # cut off by the end of the capture
    assert rows_of(read_sqlite(recording.close())) == {"round[1]": (1, pytest.approx(100e-9), 0, 0.0)}


def test_correlation_numbers_of_another_process_do_not_mix(recording):
    recording.domain(1, "draftgraph")
    recording.range(0, 100, "round[1]")
    recording.launch(50, [10])
    recording.database.execute(
        "INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (60, 5060, 0, 1, 7, 1, ?, 1, 1)", (OTHER_PROCESS,)
    )
    assert rows_of(read_sqlite(recording.close()))["round[1]"][2:] == (1, pytest.approx(10e-9))


def test_a_recording_without_kernels_has_host_times_only(recording):
    recording.domain(1, "draftgraph")
    recording.range(0, 100, "prefill[64]")
    for table in ("KERNEL", "RUNTIME"):
        recording.database.execute(f"DROP TABLE CUPTI_ACTIVITY_KIND_{table}")
    assert rows_of(read_sqlite(recording.close())) == {"prefill[64]": (1, pytest.approx(100e-9), None, None)}


NVTX_SUM = """Generating SQLite file run.sqlite from run.nsys-rep
Processing [run.sqlite] with [/opt/nvidia/nsight-systems/reports/nvtx_sum.py]...

Time (%),Total Time (ns),Instances,Avg (ns),Med (ns),Min (ns),Max (ns),StdDev (ns),Style,Range
60.0,9000,3,3000.0,3000.0,2900,3100,100.0,PushPop,draftgraph:round[1]
30.0,6000,3,2000.0,2000.0,1900,2100,100.0,PushPop,draftgraph:round[1] verify[8]
5.0,500,1,500.0,500.0,500,500,0.0,StartEnd,draftgraph:steady
2.0,200,1,200.0,200.0,200,200,0.0,StartEnd,"draftgraph:request 0, 12 prompt tokens"
1.0,100,1,100.0,100.0,100,100,0.0,PushPop,:round[1]
1.0,100,1,100.0,100.0,100,100,0.0,PushPop,NCCL:ncclAllReduce
"""
NVTX_GPU_PROJ_SUM = """Range,Style,Total Proj Time (ns),Total Range Time (ns),Range Instances,Total GPU Ops
draftgraph:round[1] verify[8],PushPop,5800,6000,3,180
"""
NVTX_KERN_SUM = """
NVTX Range,Style,PID,TID,NVTX Inst,Kern Inst,Total Time (ns),Avg (ns),Kernel Name
draftgraph:round[1] verify[8],PushPop,10,10,3,90,4000,44.4,"void gemm<float, 8>(int)"
draftgraph:round[1] verify[8],PushPop,10,10,3,"1,000","1,500",16.7,attend_kernel
"""


def test_csv_of_one_report():
    table = read_csv(NVTX_SUM.splitlines())
    assert rows_of(table) == {
        "round[1]": (3, pytest.approx(9e-6), None, None),
        "round[1] verify[8]": (3, pytest.approx(6e-6), None, None),
    }


def test_csv_of_several_reports_is_joined(tmp_path):
    file = tmp_path / "stats.csv"
    file.write_text(NVTX_SUM + "\n" + NVTX_GPU_PROJ_SUM + NVTX_KERN_SUM)
    assert rows_of(read_stats(file)) == {
        "round[1]": (3, pytest.approx(9e-6), None, None),
        "round[1] verify[8]": (3, pytest.approx(6e-6), 1090, pytest.approx(5.5e-6)),
    }


def test_csv_of_the_kernel_report_alone():
    (row,) = read_csv(NVTX_KERN_SUM.splitlines())
    assert (row.calls, row.kernels, row.width) == (3, 1090, 8)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"SKIPPED: no data\n", "has no NVTX ranges of the domain 'draftgraph'"),
        (b"garbage\n", "is neither an SQLite export nor CSV"),
        (b"\xff\xfe\x00report", "is neither an SQLite export nor CSV"),
    ],
)
def test_other_files_are_refused(tmp_path, content, message):
    file = tmp_path / "file"
    file.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read_stats(file)


def test_an_export_without_ranges_is_refused(tmp_path):
    database = sqlite3.connect(tmp_path / "run.sqlite")
    database.execute("CREATE TABLE StringIds (id INTEGER, value TEXT)")
    database.commit()
    database.close()
    with pytest.raises(ValueError, match="has no NVTX ranges"):
        read_stats(tmp_path / "run.sqlite")


def test_the_capture_is_limited_to_the_steady_state():
    line = nsys.profile_command(COMMAND, output="run")
    assert line[:4] == ["env", "DRAFTGRAPH_NVTX=1", "nsys", "profile"]
    assert {"--capture-range=nvtx", "--nvtx-capture=steady@draftgraph", "--capture-range-end=stop"} <= set(line)
    assert line[-len(COMMAND) :] == COMMAND
    whole = nsys.profile_command(COMMAND, output="run", whole=True)
    assert not any("capture" in part for part in whole)
    with pytest.raises(ValueError, match="no command to profile"):
        nsys.profile_command([], output="run")


@pytest.fixture
def invoke():
    app = typer.Typer()
    app.command()(nsys.main)
    return lambda *arguments: CliRunner().invoke(app, list(arguments))


def test_print_gives_the_command_and_runs_nothing(invoke, monkeypatch):
    monkeypatch.setenv("PATH", "")
    result = invoke("--print", "--output", "run", "--", *COMMAND)
    assert result.exit_code == 0
    assert shlex.split(result.output) == nsys.profile_command(COMMAND, output="run")


def test_a_missing_tool_is_named_with_its_packages(invoke, monkeypatch):
    monkeypatch.setenv("PATH", "")
    result = invoke("--", *COMMAND)
    assert result.exit_code == 2
    assert "nsys was not found on the PATH" in result.output
    assert "nsight-systems-cli" in result.output


def test_the_table_of_a_recording(invoke, recording):
    recording.domain(1, "draftgraph")
    recording.range(0, 2_000_000, "round[1]")
    recording.range(0, 1_500_000, "round[1] verify[8]")
    recording.launch(10, [1_000_000])
    result = invoke("--table", str(recording.close()))
    assert result.exit_code == 0, result.output
    (line,) = [line.split() for line in result.output.splitlines() if "verify[8]" in line]
    assert line == ["verify[8]", "1", "1.500", "1.5", "75.0%", "1", "1.000"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no command to profile"),
        (["--table", "missing.sqlite"], "missing.sqlite cannot be read: No such file"),
        (["--table", "x", "--", "ls"], "cannot go together with a command"),
    ],
)
def test_mistakes_are_told(invoke, arguments, message):
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert message in result.output


def test_a_run_shows_its_table(invoke, recording, tmp_path, monkeypatch):
    """A stand-in for nsys that does nothing: the export is there already."""
    tool = tmp_path / "bin" / "nsys"
    tool.parent.mkdir()
    tool.write_text(f"#!{sys.executable}\nimport sys\nsys.exit(3 if 'fail' in sys.argv else 0)\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tool.parent}:/usr/bin:/bin")
    recording.domain(1, "draftgraph")
    recording.range(0, 100, "round[1] commit")
    recording.close()
    result = invoke("--output", str(tmp_path / "run"), "--", "true")
    assert result.exit_code == 0, result.output
    assert "commit" in result.output
    failed = invoke("--output", str(tmp_path / "run"), "--", "fail")
    assert failed.exit_code == 3
    assert "nsys ended with exit code 3" in failed.output
