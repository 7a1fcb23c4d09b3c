"""A whole run of `draftgraph train`, from what was asked for to the head that was trained."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any

from ...model_zoo.training.loop import Trained, train
from ..progress import ProgressCallback, terminal_progress
from .data import Note
from .directory import check_directory, check_room, check_takes_files, one_run_at_a_time
from .dry_run import Estimate, estimate
from .memory import peak_bytes, peak_device_bytes
from .preparation import (
    MOST,
    Ready,
    check_run,
    gatherer,
    identity_before_data,
    look_at_target,
    make_ready,
)
from .processes import make_accelerator
from .request import TrainRequest
from .result import TrainResult, evaluations, keep_result, kept_result
from .show import Watch, training_progress

_LITTLE = 0.5
"""A head that can draft less of what the target wrote is warned of."""


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How the command ended. One of the first two is there, except in processes that only help."""

    result: TrainResult | None = None
    """Of a run that has come to its end."""
    stopped: Trained | None = None
    """Of one that was interrupted."""
    before: bool = False
    """It had ended before: nothing was done."""


def run(request: TrainRequest, note: Note) -> Ended:
    """Trains, from where the run in the directory stands.

    Args:
        request: what was asked for.
        note: told what was found, a line at a time, in the first process.

    Raises:
        DraftgraphError, TrainingConfigError, TrainingDataError, CheckpointError, TrainingError: see the parts.
    """
    check_directories(request)
    accelerator = make_accelerator(request.device, request.settings.batches_per_step)
    main = accelerator.is_main_process
    with contextlib.ExitStack() as stack:
        stack.callback(accelerator.end_training)
        if main:
            stack.enter_context(one_run_at_a_time(request.out))
        say: Note = note if main else _silent
        with _quiet_progress(main) as progress:
            place = look_at_target(request, accelerator, progress)
            check_room(request.out, place.parameters, place.learning)
            check_run(request, identity_before_data(request, place), accelerator, partly=True)
        gathered = gatherer(request, place).gather(accelerator, say)
        with _quiet_progress(main) as progress:
            identity: dict[str, Any] = {}

            def identified(found: dict[str, Any]) -> None:
                identity.update(found)
                check_run(request, found, accelerator, partly=False)
                known = kept_result(request.out)
                if known is not None:
                    raise _EndedBeforeError(known)

            try:
                ready = make_ready(request, place, gathered, accelerator, progress=progress, identified=identified)
            except _EndedBeforeError as ended:
                return Ended(result=ended.result, before=True)
        _describe(ready, say)
        watching = training_progress() if main else contextlib.nullcontext(_unwatched)
        with watching as watch, _interruptible(say) as stop:
            trained = train(
                ready.trainee,
                ready.train_source,
                ready.held_out_source,
                request.settings,
                request.out,
                accelerator=accelerator,
                watch=watch,
                stop=stop,
                before_save=ready.flush,
            )
        if trained.reason == "stopped":
            return Ended(stopped=trained)
        if not main:
            return Ended()
        result = _result(request, ready, trained, identity)
        keep_result(result)
        return Ended(result=result)


def dry_run(request: TrainRequest, note: Note) -> Estimate:
    """Estimates a run: nothing is written, and the target is not asked.

    Raises:
        ConfigError, TrainingConfigError, TrainingDataError: see `run`.
    """
    check_directories(request)
    accelerator = make_accelerator(request.device, request.settings.batches_per_step)
    with terminal_progress() as progress:
        place = look_at_target(request, accelerator, progress)
        gathered = gatherer(request, place).gather_dry(note, progress)
        ready = make_ready(request, place, gathered, accelerator, progress=progress, keeps_states=False)
    _describe(ready, note)
    return estimate(request, ready, accelerator)


def check_directories(request: TrainRequest) -> None:
    """Refuses directories that the run could not write to.

    Raises:
        ConfigError: one cannot be written to, or `--out` holds something else.
    """
    check_directory(request.out)
    if request.states != "online":
        check_takes_files("--states-dir", request.states_directory)


class _EndedBeforeError(Exception):
    """The run was asked for again after its end."""

    def __init__(self, result: TrainResult) -> None:
        super().__init__("the run has ended")
        self.result = result


def _describe(ready: Ready, note: Note) -> None:
    tokens = sum(len(example.tokens) for example in ready.train)
    found = f"{len(ready.train)} examples of {tokens} tokens to train on, {len(ready.held_out)} held out"
    note(found + ("" if ready.gathered.stand_ins else f"; {_coverage(ready)}"))
    if ready.warm is not None:
        left = f"; as usual begin {', '.join(ready.warm.left)}" if ready.warm.left else ""
        note(f"begins at another head's {', '.join(ready.warm.taken)}{left}")


def _coverage(ready: Ready) -> str:
    found = f"the head can draft {ready.coverage:.1%} of what the target wrote"
    if ready.coverage >= _LITTLE:
        return found
    return f"{found}, which is little: --draft-vocab-size {ready.size_for_most} would be {MOST:.0%}"


def _result(request: TrainRequest, ready: Ready, trained: Trained, identity: dict[str, Any]) -> TrainResult:
    found = evaluations(request.out)
    weights = request.out / "model.safetensors"
    return TrainResult(
        method=request.method,
        engine_method=ready.trainee.method,
        target=request.target,
        out=str(request.out),
        reason=trained.reason,
        before=found.get(0),
        after=max(found.values(), key=lambda acceptance: acceptance.rank),
        steps=trained.position.step,
        tokens=trained.position.tokens,
        seconds=trained.position.seconds,
        examples=len(ready.train),
        held_out=len(ready.held_out),
        parameters=sum(p.numel() for p in ready.trainee.parameters() if p.requires_grad),
        exported_bytes=weights.stat().st_size,
        peak_bytes=peak_bytes(),
        peak_device_bytes=peak_device_bytes(ready.place.device),
        identity=identity,
    )


@contextlib.contextmanager
def _quiet_progress(main: bool) -> Iterator[ProgressCallback]:
    """A bar in the first process."""
    if not main:
        yield lambda done, total, what: None
        return
    with terminal_progress() as progress:
        yield progress


@contextlib.contextmanager
def _interruptible(note: Note) -> Iterator[Any]:
    """Lets Ctrl-C end the run after the update at hand; a second one ends it at once.

    Yields a function that says whether it was pressed.
    """
    pressed = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield pressed.is_set
        return
    previous = signal.getsignal(signal.SIGINT)

    def press(number: int, frame: FrameType | None) -> None:
        if pressed.is_set():
            raise KeyboardInterrupt
        pressed.set()
        note("saving in this update; Ctrl-C again ends at once")

    signal.signal(signal.SIGINT, press)
    try:
        yield pressed.is_set
    finally:
        signal.signal(signal.SIGINT, previous)


def _silent(text: str) -> None:
    pass


_unwatched: Watch = lambda progress: None  # noqa: E731
