"""A device that works by itself: launches run in order on a thread, while the host goes on."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable

from draftgraph.graphs.driver.protocol import GraphError, Publish
from draftgraph.graphs.driver.recording import RecordingDriver
from draftgraph.graphs.loop_executor import LoopExecutor
from draftgraph.graphs.recording_capture import RecordingCapture
from draftgraph.graphs.round_executor import RoundExecutor


class WorkerEvent:
    def __init__(self, stream: WorkerStream) -> None:
        self._stream, self._passed = stream, threading.Event()

    def pass_by(self) -> None:
        self._passed.set()

    def query(self) -> bool:
        if self._stream.error is not None:
            raise GraphError(f"the device reports: {self._stream.error}")
        return self._passed.is_set()


class WorkerStream:
    """As on a device, the first failure spoils everything behind it."""

    def __init__(self) -> None:
        self.error: BaseException | None = None
        self.raw = self
        self._work: queue.Queue[Callable[[], None] | None] = queue.Queue()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def submit(self, call: Callable[[], None]) -> None:
        self._work.put(call)

    def record(self) -> WorkerEvent:
        event = WorkerEvent(self)
        self._work.put(event.pass_by)
        return event

    def drain(self) -> None:
        self._work.join()

    def close(self) -> None:
        self._work.put(None)
        self._thread.join(10)
        assert not self._thread.is_alive(), "a launch never ended"

    def _serve(self) -> None:
        while (call := self._work.get()) is not None:
            try:
                if self.error is None:
                    call()
            except BaseException as error:
                self.error = error
            self._work.task_done()


class WorkerDriver(RecordingDriver):
    """Launches return before they have run."""

    def __init__(self, seconds_per_launch: float = 0.0, **options) -> None:
        super().__init__(**options)
        self.seconds_per_launch = seconds_per_launch
        self.most_in_flight = 0
        """Launches of the program built last, less those that had published by then: what the host can know."""
        self._submitted, self._word = 0, None

    def add_kernel(self, graph, kernel, after):
        if isinstance(kernel, Publish):
            self._word = kernel.word
        return super().add_kernel(graph, kernel, after)

    def launch(self, executable, stream) -> None:
        run = super().launch

        def launch() -> None:
            time.sleep(self.seconds_per_launch)
            run(executable, None)

        self._submitted += 1
        published = 0 if self._word is None else int(self._word) >> 32
        self.most_in_flight = max(self.most_in_flight, self._submitted - published)
        stream.submit(launch)


class WorkerExecutor:
    """An executor on such a device, with what stream order does there: the host's own operations on tensors, which
    here run at once, come after what was launched before them."""

    def __init__(self, name: str, *, trace=None, **options) -> None:
        self.driver, self.stream = WorkerDriver(**options), WorkerStream()
        made = {"round": RoundExecutor, "loop": LoopExecutor}[name]
        self.inner = made(self.driver, RecordingCapture(self.driver, trace), self.stream)
        self.name = name

    @property
    def report(self):
        return self.inner.report

    def prepare(self, program, progress=None) -> None:
        self.inner.prepare(program, progress)

    def run(self, program) -> None:
        self.inner.run(program)
        self.stream.drain()

    def rounds(self, program):
        return self.inner.rounds(program)

    def close(self) -> None:
        self.stream.close()
