"""Checks a machine's device from end to end and writes what it found: `python -m draftgraph.profiling.gpu_check DIR`.

In order of what one wants to know first, within a time limit (7.5 minutes by default): what the machine is, the gpu
test tier, the identity of every executor's tokens with the CPU's, what loops and launches cost, how fast models at
the shapes of real ones decode, and the ops' times against their floors. DIR gets `gpu_check.json` and `gpu_check.md`,
written anew after each section, so that a run that is cut short keeps what it had.

On a machine without a GPU it runs the same sections on the CPU, smaller, and the executors of captured graphs on a
recording driver, which keeps it working.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from .checks import page

if TYPE_CHECKING:
    from ..model_zoo.decoder import DecoderModel

LIMIT_MINUTES = 7.5
GRACE_SECONDS = 20.0
"""After the limit the process ends, whatever it waits for: 8 minutes are never exceeded."""
_REPOSITORY = Path(__file__).resolve().parents[1]


@dataclass
class Section:
    """What one part of the check has given so far."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    text: str = ""
    error: str = ""
    seconds: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """In types that JSON has."""
        return {"rows": self.rows, "text": self.text, "error": self.error, "seconds": self.seconds}


@dataclass(frozen=True)
class Check:
    """What the sections are told."""

    device: torch.device
    executors: tuple[str, ...]
    """Those that work here, best first."""
    deadline: float
    """On `time.monotonic`."""
    small: bool
    """Sizes for a machine without a GPU."""

    @property
    def with_recorded(self) -> tuple[str, ...]:
        """The executors, and without a GPU those on a recording driver."""
        from .checks.random_models import RECORDED

        return (*self.executors, *RECORDED) if self.small else self.executors

    @property
    def left(self) -> float:
        """Seconds left."""
        return self.deadline - time.monotonic()


def environment(check: Check, section: Section) -> None:
    """Versions, device, driver, executors."""
    from ..runtime.doctor import report

    facts = report()
    section.text = json.dumps(facts, indent=1)
    section.rows = facts["executors"]


def gpu_tests(check: Check, section: Section) -> None:
    """The gpu test tier, in a process of its own."""
    tests = _REPOSITORY / "tests" / "gpu"
    if not tests.is_dir():
        section.text = f"left out: there is no {tests}; run the check from a clone"
        return
    _pytest(check, section, [str(tests), "-q", "--no-header"], share=0.5)


def identity(check: Check, section: Section) -> None:
    """Every executor's tokens against the CPU's."""
    from .checks.identity import check_identities

    shapes = ("tiny",) if check.small else ("tiny", "1B")
    tokens = 10 if check.small else 32
    for result in check_identities(check.device, check.with_recorded, shapes=shapes, tokens=tokens):
        section.rows.append(result.to_dict())
        if check.left < 0:
            section.error = "no time was left for the rest"
            return


def loops(check: Check, section: Section) -> None:
    """Empty rounds and graphs of many nodes, by executor."""
    from ..graphs import choose_executor
    from .checks.loop_costs import launch_costs, loop_costs

    for name in check.executors:
        executor = choose_executor(name, check.device)
        section.rows += [cost.to_dict() for cost in loop_costs(executor, check.device, 100 if check.small else 1000)]
    lines = []
    for name in check.executors:
        sizes = (1, 10) if check.small else (1, 10, 100, 1000)
        for cost in launch_costs(choose_executor(name, check.device), check.device, sizes):
            lines.append(
                f"{cost.executor}: a launch of {cost.kernels} kernels, {cost.host_microseconds:.1f} us on the host, "
                f"{cost.total_microseconds:.1f} us in all"
            )
    section.text = "\n".join(lines)


def decoding(check: Check, section: Section) -> None:
    """Tokens per second at real shapes."""
    from .checks.decoding import decoding_speed, measure_bandwidth, shared_model

    bandwidth = measure_bandwidth(check.device, 64 if check.small else 2048)
    section.text = f"A copy moves {bandwidth / 1e9:.0f} GB/s."
    if check.with_recorded != check.executors:
        section.text += "\nOf a recorded executor the counts are real and the times are not: its launches end at once."
    dtype = torch.float32 if check.small else torch.bfloat16
    for shape in ("tiny",) if check.small else ("1B", "8B"):
        model: DecoderModel | None = None  # lets go of the one before
        for method, drafts in (("none", 0), ("ngram", 7)):
            for executor in check.with_recorded:
                if check.left < 0:
                    section.error = "no time was left for the rest"
                    return
                tokens = 32 if check.small else 256
                try:
                    model = model or shared_model(shape, check.device, dtype, compile=not check.small)
                    speed = decoding_speed(shape, model, method, drafts, executor, bandwidth, tokens)
                    section.rows.append(speed.to_dict())
                except Exception as problem:  # such as too little memory; the page lists it, and the others still run
                    row = {"shape": shape, "method": method, "drafts": drafts, "executor": executor}
                    error = f"{type(problem).__name__}: {problem}"
                    section.rows.append({**row, "passed": False, "error": error})


def ops(check: Check, section: Section) -> None:
    """Every op's time against its floor."""
    tests = _REPOSITORY / "tests" / "bench" / "test_ops.py"
    if check.small or not tests.is_file():
        section.text = "left out: it needs a GPU and a clone"
        return
    _pytest(check, section, [str(tests), "-q", "--no-header", "-s", "--benchmark-enable"], share=0.9)


SECTIONS: dict[str, Callable[[Check, Section], None]] = {
    "environment": environment,
    "gpu tests": gpu_tests,
    "identity": identity,
    "loops": loops,
    "decoding": decoding,
    "ops": ops,
}
"""By name, in the order in which they run."""


def _pytest(check: Check, section: Section, arguments: list[str], share: float) -> None:
    missing = [name for name in ("pytest", "pytest_benchmark") if importlib.util.find_spec(name) is None]
    if missing:
        section.text = f"left out: not installed are {', '.join(missing)} (pip install pytest pytest-benchmark)"
        return
    command = [sys.executable, "-m", "pytest", *arguments]
    try:
        run = subprocess.run(
            command, cwd=_REPOSITORY, capture_output=True, text=True, timeout=max(10.0, share * check.left)
        )
    except subprocess.TimeoutExpired as expired:
        output = expired.stdout or b""
        section.text = output.decode(errors="replace") if isinstance(output, bytes) else output
        section.error = f"ran past {expired.timeout:.0f} s"
        return
    section.text = run.stdout[-20_000:] + run.stderr[-4_000:]
    if run.returncode not in (0, 5):  # 5: no test was collected, as where all are skipped at import
        section.error = f"pytest ended with status {run.returncode}"


def working_executors(device: torch.device) -> tuple[str, ...]:
    """The executors that the ladder offers on `device`, best first."""
    from ..graphs.executors import available_executors

    return tuple(status.name for status in available_executors(device) if status.available)


def run_sections(
    check: Check, names: list[str], save: Callable[[dict[str, Section], list[str]], None]
) -> Iterator[str]:
    """Runs sections until the time is up; yields a line on each.

    Args:
        check: what they are told.
        names: of `SECTIONS`.
        save: called before and after each with what there is, and with the names of those still to come.
    """
    done: dict[str, Section] = {}
    for index, name in enumerate(names):
        if check.left <= 0:
            save(done, names[index:])
            yield f"left out, no time was left: {', '.join(names[index:])}"
            return
        section = done[name] = Section()
        save(done, names[index + 1 :])
        start = time.monotonic()
        try:
            SECTIONS[name](check, section)
        except Exception as problem:  # the others still run, and the page shows it
            section.error = f"{type(problem).__name__}: {problem}"
        section.seconds = time.monotonic() - start
        save(done, names[index + 1 :])
        yield f"{name}: {page.state(section.to_dict())} ({section.seconds:.1f} s)"


def main(arguments: list[str] | None = None) -> int:
    """The command; its result is the process's exit status: 0 when nothing failed."""
    parser = argparse.ArgumentParser(prog="python -m draftgraph.profiling.gpu_check", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("directory", type=Path, metavar="DIR", help="where gpu_check.json and gpu_check.md go")
    parser.add_argument("--minutes", type=float, default=LIMIT_MINUTES, help="the time limit (default: %(default)s)")
    parser.add_argument("--device", help="cuda or cpu (default: cuda where there is one)")
    parser.add_argument("--only", metavar="NAME", action="append", choices=list(SECTIONS), help="run this section only")
    options = parser.parse_args(arguments)
    if not options.minutes > 0:
        parser.error(f"--minutes must be positive, got {options.minutes}")
    if options.device not in (None, "cuda", "cpu"):
        parser.error(f"--device must be cuda or cpu, got {options.device!r}")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: PyTorch sees no CUDA device here")
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    directory: Path = options.directory
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as problem:
        parser.error(f"DIR {str(directory)!r} takes no files: {problem.strerror}")
    if importlib.util.find_spec("platformdirs") is None:  # which alone knows where the user's cache is
        os.environ.setdefault("DRAFTGRAPH_CACHE", str(directory / "cache"))
    deadline = time.monotonic() + 60 * options.minutes

    from ..runtime.doctor import package_version

    report: dict[str, Any] = {
        "version": package_version("draftgraph"),
        "date": time.strftime("%Y-%m-%d"),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
    }

    writing = threading.Lock()
    latest: dict[str, Section] = {}

    def save(done: dict[str, Section], left_out: list[str]) -> None:
        with writing:
            latest.update(done)
            report["sections"] = {name: section.to_dict() for name, section in done.items()}
            report["left_out"] = left_out
            (directory / "gpu_check.json").write_text(json.dumps(report, indent=1), encoding="utf-8")
            (directory / "gpu_check.md").write_text(page.render(report), encoding="utf-8")

    def stop() -> None:
        """Ends the process at the limit, whatever the section under way waits for: it may be a device that hangs."""
        try:
            reason = f"stopped at the limit of {options.minutes:g} minutes"
            if latest:
                section = list(latest.values())[-1]
                section.error = section.error or reason
                save(dict(latest), report["left_out"])
            print(f"{list(latest)[-1] if latest else 'probing the executors'}: {reason}", flush=True)
        finally:
            os._exit(1)

    save({}, options.only or list(SECTIONS))
    # The sections look at the clock between their parts, and get a little time for the part under way.
    watchdog = threading.Timer(60 * options.minutes + GRACE_SECONDS, stop)
    watchdog.daemon = True
    watchdog.start()

    check = Check(device, working_executors(device), deadline, device.type == "cpu")
    print(f"checking {report['device']} with executors {', '.join(check.executors)}", flush=True)
    for line in run_sections(check, options.only or list(SECTIONS), save):
        print(line, flush=True)
    watchdog.cancel()
    print(f"wrote {directory / 'gpu_check.md'}")
    sections = report["sections"].values()
    good = not report["left_out"] and all(
        not s["error"] and all(row.get("passed") is not False for row in s["rows"]) for s in sections
    )
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
