"""The optimisers of a head: one for matrices, one for the rest."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from .muon import Muon
from .settings import TrainingSettings
from .sharding import ShardedMuon


def make_optimizers(
    trainee: nn.Module, settings: TrainingSettings, *, sharded: bool = False
) -> dict[str, torch.optim.Optimizer]:
    """The optimisers by name.

    With `muon` the matrices of projections are updated along the orthogonalised momentum (Jordan et al. 2024), scaled
    so that AdamW's learning rates hold (Liu et al. 2025, arXiv 2502.16982); embeddings, heads to the vocabulary, norms
    and biases take AdamW, as everything does without it.

    Args:
        trainee: the head; parameters that do not learn are left out.
        settings: of the run.
        sharded: the parameters are spread over processes.
    """
    matrices: list[nn.Parameter] = []
    rest: list[nn.Parameter] = []
    tables = {id(module.weight) for module in trainee.modules() if isinstance(module, nn.Embedding)}
    for name, parameter in trainee.named_parameters():
        if not parameter.requires_grad:
            continue
        narrow = parameter.dim() != 2 or min(parameter.shape) < 8
        wide = id(parameter) in tables or "lm_head" in name or max(parameter.shape) >= 8 * min(parameter.shape)
        (rest if narrow or wide or settings.optimizer == "adamw" else matrices).append(parameter)
    found: dict[str, torch.optim.Optimizer] = {}
    if matrices:
        found["matrices"] = (ShardedMuon if sharded else Muon)(
            matrices, lr=settings.peak_rate, weight_decay=settings.weight_decay
        )
    if rest:
        found["rest"] = torch.optim.AdamW(
            rest, lr=settings.peak_rate, betas=(0.9, 0.95), weight_decay=settings.weight_decay
        )
    return found


def state_of(optimizers: Mapping[str, Any]) -> dict[str, Any]:
    """What a checkpoint keeps of them."""
    return {name: optimizer.state_dict() for name, optimizer in optimizers.items()}


def restore(optimizers: Mapping[str, Any], state: Mapping[str, Any]) -> None:
    """Puts back what `state_of` gave."""
    for name, optimizer in optimizers.items():
        optimizer.load_state_dict(state[name])


def set_rate(optimizers: Iterable[Any], rate: float) -> None:
    """Sets the learning rate of all."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = rate
