"""How a head is trained, whatever its method."""

from __future__ import annotations

import math
from dataclasses import dataclass

RATES = {"muon": 4e-3, "adamw": 1e-3}
"""The optimisers, and a learning rate that heads of some million weights learn well at with each."""
OPTIMIZERS = tuple(RATES)


@dataclass(frozen=True, kw_only=True)
class TrainingSettings:
    """The optimiser's and the schedule's choices; a run is a function of these, its data and its options."""

    epochs: int = 3
    optimizer: str = "muon"
    """One of `OPTIMIZERS`."""
    learning_rate: float | None = None
    """At its peak; None: the optimiser's own, of `RATES`, which then stands here."""
    warmup_steps: int = 20
    """It rises linearly for so many updates, then falls to a fiftieth along a cosine."""
    weight_decay: float = 0.01
    clip_norm: float = 1.0
    """Gradients are scaled down to this norm."""
    batch_tokens: int = 2048
    """The most tokens of a batch, padding included."""
    batches_per_step: int = 1
    """Batches whose gradients are averaged for one update; shared among the processes."""
    seed: int = 0
    bfloat16: bool = False
    """Compute in bfloat16 where PyTorch's autocast does; weights stay float32."""
    evaluate_every: int = 0
    """Updates between two evaluations besides those at the end of each epoch; 0: none."""
    patience: int = 3
    """Training ends after so many evaluations without a better acceptance, those of the warm-up not counted."""
    save_every: float = 60.0
    """Seconds between two checkpoints."""

    def __post_init__(self) -> None:
        if self.optimizer not in OPTIMIZERS:
            raise ValueError(f"optimizer must be one of {', '.join(OPTIMIZERS)}, got {self.optimizer!r}")
        if self.learning_rate is None:
            object.__setattr__(self, "learning_rate", RATES[self.optimizer])
        for name in ("epochs", "batch_tokens", "batches_per_step", "patience"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("learning_rate", "clip_norm"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0.0):
                raise ValueError(f"{name} must be positive and finite, got {value}")
        for name in ("weight_decay", "save_every"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0.0):
                raise ValueError(f"{name} must be finite and not negative, got {value}")
        for name in ("warmup_steps", "evaluate_every", "seed"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}")

    @property
    def peak_rate(self) -> float:
        """The learning rate at its peak."""
        return RATES[self.optimizer] if self.learning_rate is None else self.learning_rate

    def rate(self, step: int, total: int) -> float:
        """The learning rate of update `step`, from 0, of so many."""
        rise = min(1.0, (step + 1) / max(1, self.warmup_steps))
        fall = 0.02 + 0.98 * 0.5 * (1.0 + math.cos(math.pi * min(1.0, step / max(1, total))))
        return self.peak_rate * rise * fall
