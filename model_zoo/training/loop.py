"""The training loop: one process on a laptop, many on GPUs, through accelerate."""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch

from ..json_text import parse_json
from . import checkpoints
from .batch import TrainingBatch, plan_batches
from .checkpoints import Position
from .export import WEIGHTS_NAME, export_head
from .files import replace_file
from .optimizers import make_optimizers, restore, set_rate, state_of
from .settings import TrainingSettings
from .sharding import gathered, shard, shard_state
from .trainee import Trainee

LOG_NAME = "log.jsonl"
STATE_NAME = "training"
"""The folder of a run's state, in the directory of its head."""


class TrainingError(RuntimeError):
    """Training cannot go on."""


class BatchSource(Protocol):
    """Texts with what the target makes of them."""

    @property
    def lengths(self) -> Sequence[int]:
        """Tokens of each text."""

    def batch(self, indices: Sequence[int]) -> TrainingBatch:
        """Some texts side by side, on the head's device."""


@dataclass(frozen=True)
class Acceptance:
    """How a head does on texts that it was not trained on."""

    loss: float
    rates: tuple[float, ...]
    """Of each i, the share of places where drafts 1 to i are all what the target wrote."""

    @property
    def length(self) -> float:
        """Tokens per round that this gives, the target's own included."""
        return 1.0 + sum(self.rates)

    @property
    def rank(self) -> tuple[float, float]:
        """What is greater is better: where as many drafts are accepted, the loss decides."""
        return self.length, -self.loss


@dataclass(frozen=True)
class Progress:
    """For whoever watches."""

    position: Position
    total_steps: int
    loss: float
    rates: tuple[float, ...]
    """Of the last batches, see `Acceptance`."""
    held_out: Acceptance | None
    """Of the last evaluation."""
    parts: dict[str, float]


@dataclass(frozen=True)
class Trained:
    """How a run ended."""

    position: Position
    held_out: Acceptance | None
    reason: str
    """"finished", "no better" after `patience` evaluations, or "stopped" where `stop` said so."""


@torch.no_grad()
def evaluate(trainee: Trainee, source: BatchSource, settings: TrainingSettings, accelerator: Any = None) -> Acceptance:
    """A head's acceptance over all texts of a source, the same ones with the same random choices every time.

    Args:
        trainee: the head.
        source: the texts.
        settings: of the run.
        accelerator: accelerate's, whose processes share the texts; None: this process reads all of them.
    """
    rank, world = (0, 1) if accelerator is None else (accelerator.process_index, accelerator.num_processes)
    plan = plan_batches(source.lengths, budget=settings.batch_tokens, seed=0, epoch=0)
    training = trainee.training
    trainee.eval()
    sums = torch.zeros(1 + 2 * trainee.num_drafts, dtype=torch.float64)
    numbers = range(rank, len(plan), world)
    if accelerator is not None and accelerator.is_fsdp2:
        # Every pass needs all processes' parts of the weights. One without a batch computes some batch for nothing.
        numbers = range(rank, world * -(-len(plan) // world), world)
    for number in numbers:
        mine = number < len(plan)
        outcome = trainee(source.batch(plan[number if mine else 0]), _generator(0, number, 0))
        if mine:
            sums += torch.cat((outcome.loss[None] / len(plan), outcome.accepted, outcome.counted)).cpu()
    trainee.train(training)
    if accelerator is not None:
        sums = accelerator.reduce(sums.to(accelerator.device)).cpu()
    accepted, counted = sums[1:].chunk(2)
    return Acceptance(float(sums[0]), tuple((accepted / counted.clamp_min(1.0)).tolist()))


def train(
    trainee: Trainee,
    source: BatchSource,
    held_out: BatchSource,
    settings: TrainingSettings,
    directory: Path,
    *,
    accelerator: Any,
    watch: Callable[[Progress], None] = lambda progress: None,
    stop: Callable[[], bool] = lambda: False,
    before_save: Callable[[], None] = lambda: None,
) -> Trained:
    """Trains a head, from where the run in the directory stands.

    The head with the best acceptance so far lies in the directory, ready to be loaded; the run's state and its log lie
    in its folder `training`.

    Args:
        trainee: the head, as it begins.
        source: the texts.
        held_out: texts that it is not trained on.
        settings: of the run.
        directory: of the head.
        accelerator: accelerate's; where it is configured for FSDP2, the head is sharded over its processes.
        watch: told about every update.
        stop: asked in every update, before the weights change; once it says so in any process, they do not, and the run
            is saved and ends.
        before_save: called before every checkpoint, to put on the disk what a run that goes on from it relies on.

    Raises:
        TrainingError: the loss or its gradient is not finite, or a checkpoint cannot be written; the last checkpoint
            and the best head stay.
        CheckpointError: the run's state is damaged.
    """
    state_directory = directory / STATE_NAME
    state_directory.mkdir(parents=True, exist_ok=True)
    position = Position()
    saved = checkpoints.load(state_directory)
    if saved is not None:
        trainee.load_state_dict(saved[0])
        position = saved[2]
    sharded = accelerator.is_fsdp2
    if sharded:
        shard(trainee, accelerator)
    optimizers = make_optimizers(trainee, settings, sharded=sharded)
    if saved is not None:
        restore(optimizers, saved[1])
        if sharded:
            shard_state(optimizers)
    log = _Log(state_directory / LOG_NAME, position.step, writes=accelerator.is_main_process)
    model: torch.nn.Module = trainee
    if not sharded:
        model = accelerator.prepare(trainee)
        optimizers = {name: accelerator.prepare(optimizer) for name, optimizer in optimizers.items()}
    run = _Run(
        trainee,
        model,
        optimizers,
        source,
        held_out,
        settings,
        directory,
        accelerator,
        watch,
        stop,
        before_save,
        log,
        position,
    )
    return run.go()


class _Run:
    """A run in memory."""

    def __init__(
        self,
        trainee: Trainee,
        model: torch.nn.Module,
        optimizers: dict[str, Any],
        source: BatchSource,
        held_out: BatchSource,
        settings: TrainingSettings,
        directory: Path,
        accelerator: Any,
        watch: Callable[[Progress], None],
        stop: Callable[[], bool],
        before_save: Callable[[], None],
        log: _Log,
        position: Position,
    ) -> None:
        self._trainee, self._model, self._optimizers = trainee, model, optimizers
        self._source, self._held_out, self._settings = source, held_out, settings
        self._directory, self._accelerator, self._log = directory, accelerator, log
        self._watch, self._stop, self._before_save = watch, stop, before_save
        self._position = position
        self._acceptance = log.last_evaluation()
        self._stop_now = False
        self._saved_at = self._began = time.monotonic()
        self._before = position.seconds
        world = accelerator.num_processes
        if settings.batches_per_step % world:
            raise TrainingError(
                f"batches_per_step is {settings.batches_per_step}, which {world} processes cannot share evenly: use a "
                f"multiple of {world}"
            )

    def _plan(self, epoch: int) -> list[list[list[int]]]:
        """The updates of an epoch: the batches of each. A last update may have fewer."""
        settings = self._settings
        batches = plan_batches(self._source.lengths, budget=settings.batch_tokens, seed=settings.seed, epoch=epoch)
        size = settings.batches_per_step
        return [batches[start : start + size] for start in range(0, len(batches), size)]

    def go(self) -> Trained:
        """Trains to the end."""
        settings, reason = self._settings, "finished"
        # Every epoch has about as many; the schedule needs one number that does not change.
        total = settings.epochs * len(self._plan(0))
        if self._position.step == 0:
            self._judge(keep=True)
        while self._position.epoch < settings.epochs and not self._gave_up and not self._stop_now:
            plan = self._plan(self._position.epoch)
            for batches in plan[self._position.batch :]:
                self._update(batches, total)
                if self._stop_now:
                    break
                every = settings.evaluate_every
                if every and self._position.step % every == 0 and self._position.batch < len(plan):
                    self._judge()
                if self._gave_up:
                    break
            if self._gave_up or self._stop_now:
                break
            self._position = replace(self._position, epoch=self._position.epoch + 1, batch=0)
            self._judge()
            self._save()
        self._save()
        if self._position.epoch < settings.epochs:
            reason = "no better" if self._gave_up else "stopped"
        return Trained(self._position, self._acceptance, reason)

    @property
    def _gave_up(self) -> bool:
        return self._position.stale >= self._settings.patience

    def _update(self, batches: list[list[int]], total: int) -> None:
        """One update of the weights; none where the run is to stop.

        What is saved are weights whose loss and gradient were finite, so that a run can always go on from there.
        """
        accelerator, settings, position = self._accelerator, self._settings, self._position
        rank, world = accelerator.process_index, accelerator.num_processes
        set_rate(self._optimizers.values(), settings.rate(position.step, total))
        numbers = range(rank, len(batches), world)
        if world > 1:
            # All processes must take part as often. One without a batch of its own computes some batch for nothing.
            numbers = range(rank, world * -(-len(batches) // world), world)
        sums = torch.zeros(1 + 2 * self._trainee.num_drafts)
        tokens, parts = 0, dict[str, float]()
        for number in numbers:
            mine = number < len(batches)
            batch = self._source.batch(batches[number if mine else 0])
            generator = _generator(settings.seed, position.step, number)
            # Gradients are exchanged once, with the last batch.
            last = number == numbers[-1]
            with contextlib.nullcontext() if last else accelerator.no_sync(self._model):
                with torch.autocast(accelerator.device.type, torch.bfloat16, enabled=settings.bfloat16):
                    outcome = self._model(batch, generator)
                # DDP and FSDP take the mean over processes, and the update is the mean over all batches.
                accelerator.backward(outcome.loss * (world / len(batches) if mine else 0.0))
            if mine:
                sums += torch.cat((outcome.loss.detach()[None] / len(batches), outcome.accepted, outcome.counted)).cpu()
                tokens += int(batch.valid.sum())
                parts = {name: float(value) for name, value in outcome.parts.items()}
        # What depends on clocks and signals is decided together too.
        due = accelerator.is_main_process and time.monotonic() - self._saved_at > settings.save_every
        also = torch.tensor([float(tokens), float(due), float(self._stop())])
        sums = accelerator.reduce(torch.cat((sums, also)).to(accelerator.device)).cpu()
        loss, tokens = float(sums[0]), int(sums[-3])
        save_now, self._stop_now = bool(sums[-2] > 0), bool(sums[-1] > 0)
        if not torch.isfinite(sums[0]):
            raise self._not_finite(f"loss of update {position.step + 1}", loss)
        learning = [p for p in self._model.parameters() if p.requires_grad]
        norm = accelerator.clip_grad_norm_(learning, settings.clip_norm)
        if norm is not None and not torch.isfinite(norm):
            raise self._not_finite(f"gradient of update {position.step + 1}", float(norm))
        if self._stop_now:
            return
        if save_now:
            self._save()
        for optimizer in self._optimizers.values():
            optimizer.step()
            optimizer.zero_grad()
        accepted, counted = sums[1:-3].chunk(2)
        rates = tuple((accepted / counted.clamp_min(1.0)).tolist())
        self._position = replace(
            position,
            batch=position.batch + 1,
            step=position.step + 1,
            tokens=position.tokens + tokens,
            seconds=self._before + time.monotonic() - self._began,
        )
        self._note({"step": self._position.step, "tokens": self._position.tokens, "loss": loss, "rates": rates})
        self._watch(Progress(self._position, total, loss, rates, self._acceptance, parts))

    def _not_finite(self, what: str, value: float) -> TrainingError:
        kept = "last checkpoint and the best head so far stay"
        if not checkpoints.exists(self._directory / STATE_NAME):
            kept = "best head so far stays"
        other = ", or computing in float32," if self._settings.bfloat16 else ""
        return TrainingError(
            f"the {what} is {value}: training stops. The {kept} in {str(self._directory)!r}; a learning rate below "
            f"{self._settings.peak_rate:g}{other} may help, in another directory"
        )

    def _judge(self, keep: bool = False) -> None:
        """Evaluates, and exports the head if it is the best so far."""
        found = self._acceptance = evaluate(self._trainee, self._held_out, self._settings, self._accelerator)
        position = self._position
        if not math.isfinite(found.loss):
            raise self._not_finite(f"loss on held-out texts after update {position.step}", found.loss)
        better = keep or found.rank > (position.best, -position.best_loss)
        # While the rate still rises, nothing is to be expected.
        waited = 0 if better or position.step <= self._settings.warmup_steps else position.stale + 1
        best, best_loss = (found.length, found.loss) if better else (position.best, position.best_loss)
        self._position = replace(position, best=best, best_loss=best_loss, stale=waited)
        self._note(
            {
                "step": self._position.step,
                "tokens": self._position.tokens,
                "seconds": self._position.seconds,
                "held_out_loss": found.loss,
                "held_out_rates": found.rates,
                "held_out_length": found.length,
            }
        )
        if better:
            tensors = self._whole(self._trainee.export_tensors())
            if self._accelerator.is_main_process:
                with self._writing("head", self._directory / WEIGHTS_NAME):
                    export_head(self._trainee, self._directory, tensors=tensors)

    def _whole(self, value: Any) -> Any:
        """What is sharded over the processes, in one piece in the first one; all must ask for it."""
        accelerator = self._accelerator
        return gathered(value, keep=accelerator.is_main_process) if accelerator.is_fsdp2 else value

    def _note(self, entry: dict[str, Any]) -> None:
        """Adds a line to the log."""
        with self._writing("log", None):
            self._log.write(entry)

    @contextlib.contextmanager
    def _writing(self, what: str, before: Path | None) -> Iterator[None]:
        """Says what a full disk means for the run, whose file of that kind was `before` until now."""
        try:
            yield
        except OSError as error:
            stays = "the one before stays: " if before is not None and before.exists() else ""
            raise TrainingError(
                f"the {what} of update {self._position.step} could not be written to {str(self._directory)!r}: "
                f"{error.strerror or error}; {stays}make room and start again"
            ) from None

    def _save(self) -> None:
        self._before_save()
        self._accelerator.wait_for_everyone()
        model, optimizers = self._whole(self._trainee.state_dict()), self._whole(state_of(self._optimizers))
        if self._accelerator.is_main_process:
            with self._writing("checkpoint", checkpoints.file_in(self._directory / STATE_NAME)):
                checkpoints.save(self._directory / STATE_NAME, model, optimizers, self._position)
        self._saved_at = time.monotonic()


class _Log:
    """One JSON object per line; what was written after the last checkpoint is dropped when a run goes on."""

    def __init__(self, path: Path, step: int, *, writes: bool) -> None:
        self._path, self._writes = path, writes
        self._last: dict[str, Any] | None = None
        if path.exists():
            kept = []
            for line in path.read_text(encoding="utf-8").splitlines():
                try:
                    entry = parse_json(line)
                except ValueError:  # cut short by a kill
                    break
                if entry["step"] > step or step == 0:
                    break
                kept.append(line + "\n")
                self._last = entry if "held_out_length" in entry else self._last
            if writes:
                with replace_file(path) as part:
                    part.write_text("".join(kept), encoding="utf-8")

    def last_evaluation(self) -> Acceptance | None:
        """Of the run that goes on."""
        last = self._last
        return None if last is None else Acceptance(last["held_out_loss"], tuple(last["held_out_rates"]))

    def write(self, entry: dict[str, Any]) -> None:
        if self._writes:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(entry) + "\n")


def _generator(seed: int, step: int, number: int) -> torch.Generator:
    """Of one batch's random choices, however often the run was resumed and however many processes share it."""
    return torch.Generator().manual_seed((seed * 1_000_003 + step) * 1009 + number)
