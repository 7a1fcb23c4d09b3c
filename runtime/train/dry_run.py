"""What a training run would take, measured on a few of its batches."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from ...model_zoo.training.batch import plan_batches
from ...model_zoo.training.optimizers import make_optimizers
from .answering_progress import duration
from .memory import gigabytes, peak_bytes, peak_device_bytes
from .preparation import Ready
from .request import TrainRequest

_TIMED = 3
"""Batches that are timed, after the largest, which is not."""


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """What a run would take."""

    trainable_parameters: int
    parameters: int
    """With those that do not learn."""
    exported_bytes: int
    states_bytes: int
    """Of the hidden states of all examples, where they are kept."""
    peak_bytes: int
    """Of memory, as seen while the largest batch was learnt from."""
    peak_device_bytes: int | None
    tokens_per_epoch: int
    updates: int
    seconds: float
    """Of all epochs with their evaluations, on this machine with one process."""
    stand_ins: int
    """Examples that the target has not answered yet, taken as long as they may become."""

    def to_json(self) -> dict[str, Any]:
        """Types that JSON has."""
        return asdict(self)

    def lines(self) -> list[str]:
        """For people."""
        device = "" if self.peak_device_bytes is None else f", {gigabytes(self.peak_device_bytes)} on the GPU"
        found = [
            f"parameters: {self.trainable_parameters:,} learn, {self.parameters:,} in all",
            f"the exported head: {gigabytes(self.exported_bytes)}",
            f"hidden states on disk, with --states offline or hybrid: {gigabytes(self.states_bytes)}",
            f"peak memory, about: {gigabytes(self.peak_bytes)} resident{device}",
            f"tokens per epoch: {self.tokens_per_epoch:,}",
            f"updates: {self.updates:,}",
            f"time to train, about: {duration(self.seconds)}",
        ]
        if self.stand_ins:
            found.append(
                f"{self.stand_ins} prompts are not answered yet: sizes and times are those of the longest answers, and "
                "the time to answer comes on top"
            )
        return found


def estimate(request: TrainRequest, ready: Ready, accelerator: Any) -> Estimate:
    """Learns from a few batches, and throws away what was learnt."""
    settings, source = request.settings, ready.train_source
    plan = plan_batches(source.lengths, budget=settings.batch_tokens, seed=settings.seed, epoch=0)
    optimizers = list(make_optimizers(ready.trainee, settings).values())
    largest = max(plan, key=lambda batch: max(source.lengths[index] for index in batch) * len(batch))

    def learn(indices: list[int]) -> None:
        batch = source.batch(indices)
        with torch.autocast(accelerator.device.type, torch.bfloat16, enabled=settings.bfloat16):
            outcome = ready.trainee(batch, torch.Generator().manual_seed(0))
        outcome.loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

    _timed(lambda: learn(largest), accelerator.device)
    timed = plan[:: max(1, len(plan) // _TIMED)][:_TIMED]
    seconds = sum(_timed(lambda indices=indices: learn(indices), accelerator.device) for indices in timed)  # type: ignore[misc]
    per_token = seconds / sum(_padded(source.lengths, indices) for indices in timed)
    held = ready.held_out_source
    held_plan = plan_batches(held.lengths, budget=settings.batch_tokens, seed=0, epoch=0)

    def judge() -> None:
        with torch.no_grad():
            ready.trainee(held.batch(held_plan[0]), torch.Generator().manual_seed(0))

    evaluating = _timed(judge, accelerator.device) * len(held_plan)
    updates = settings.epochs * -(-len(plan) // settings.batches_per_step)
    evaluations = 1 + settings.epochs + (updates // settings.evaluate_every if settings.evaluate_every else 0)
    tensors = ready.trainee.export_tensors().values()
    return Estimate(
        trainable_parameters=sum(p.numel() for p in ready.trainee.parameters() if p.requires_grad),
        parameters=sum(p.numel() for p in ready.trainee.parameters()),
        exported_bytes=sum(t.numel() * (2 if t.is_floating_point() else t.element_size()) for t in tensors),
        states_bytes=ready.stored_bytes,
        peak_bytes=peak_bytes(),
        peak_device_bytes=peak_device_bytes(ready.place.device),
        tokens_per_epoch=sum(source.lengths),
        updates=updates,
        seconds=settings.epochs * per_token * sum(_padded(source.lengths, batch) for batch in plan)
        + evaluations * evaluating,
        stand_ins=ready.gathered.stand_ins,
    )


def _padded(lengths: Any, indices: list[int]) -> int:
    return max(lengths[index] for index in indices) * len(indices)


def _timed(work: Callable[[], None], device: torch.device) -> float:
    """Seconds."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    began = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began
