"""The step table and a Chrome trace from torch.profiler, which sees every op and, on a GPU, every kernel."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function, supported_activities

from ..graphs import Program, Step
from .names import DOMAIN, StepName
from .observer import Observer
from .step_timer import StepTime, in_order

_PREFIX = f"{DOMAIN}:"


class TorchTrace(Observer):
    """Records while its `with` block lasts; attach it to an engine meanwhile.

    The profiler makes every op slower, and steps of many small ops most. Take times from a `StepTimer`, and from
    here what a step is made of.
    """

    def __init__(self) -> None:
        activities = supported_activities()
        self._sees_kernels = ProfilerActivity.CUDA in activities
        self._profile = profile(activities=activities)

    def __enter__(self) -> TorchTrace:
        self._profile.__enter__()
        return self

    def __exit__(self, *exc: Any) -> None:
        self._profile.__exit__(*exc)

    def run(self, program: Program) -> AbstractContextManager[Any]:
        """A record named after the program."""
        return record_function(f"{_PREFIX}{program.name}")

    def step(self, program: Program, step: Step) -> AbstractContextManager[Any]:
        """A record named after program and step."""
        return record_function(f"{_PREFIX}{program.name} {step.name}")

    def table(self) -> list[StepTime]:
        """Every pass and step as the host saw it, in the order of `in_order`.

        On a GPU `kernel_seconds` has the time of the kernels that the step launched.
        """
        rows: dict[str, StepTime] = {}
        host = torch.autograd.DeviceType.CPU
        for event in sorted(self._profile.events() or [], key=lambda event: event.time_range.start):
            if event.name.startswith(_PREFIX) and event.device_type == host:
                before = rows.get(event.name)
                kernels = event.device_time_total / 1e6 + (before.kernel_seconds or 0.0 if before else 0.0)
                rows[event.name] = StepTime(
                    name=StepName.parse(event.name.removeprefix(_PREFIX)),
                    calls=1 + (before.calls if before else 0),
                    seconds=event.cpu_time_total / 1e6 + (before.seconds if before else 0.0),
                    kernel_seconds=kernels if self._sees_kernels else None,
                )
        return in_order(rows.values())

    def save(self, file: Path) -> None:
        """Writes a Chrome trace, to be opened in chrome://tracing or Perfetto."""
        self._profile.export_chrome_trace(str(file))
