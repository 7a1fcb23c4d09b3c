"""A head that is spread over processes: each keeps a part of the weights, the gradients and the optimisers' state."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from .muon import Muon
from .trainee import Outcome


def shard(trainee: nn.Module, accelerator: Any) -> None:
    """Spreads a head over all processes, in place, by PyTorch's FSDP2 (`fully_shard`).

    The head is one piece: its weights are gathered for a pass, and dropped after it. Layer by layer would not do, since
    heads call the parts of their layers, not the layers; and they have one or two.

    Args:
        trainee: the same in every process.
        accelerator: accelerate's; of its FSDP configuration, `reshard_after_forward` says whether the gathered weights
            are dropped between a pass and its gradient too.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FSDPModule, fully_shard

    _make_outcomes_visible()
    mesh = init_device_mesh(accelerator.device.type, (accelerator.num_processes,))
    fully_shard(trainee, mesh=mesh, reshard_after_forward=accelerator.state.fsdp_plugin.reshard_after_forward)
    assert isinstance(trainee, FSDPModule)
    # The mean is a sum, divided: gloo has no other, and so it is one and the same everywhere.
    trainee.set_force_sum_reduction_for_comms(True)


def gathered(value: Any, *, keep: bool) -> Any:
    """Gathers what is sharded; all processes must call it with the same.

    Args:
        value: tensors, in mappings and lists.
        keep: False: this process only gives its parts, and gets None in the place of sharded tensors.

    Returns:
        The same with whole tensors, which lie on the CPU where they were sharded.
    """
    from torch.distributed.tensor import DTensor

    if isinstance(value, DTensor):
        whole = value.full_tensor().detach()
        return whole.cpu() if keep else None
    if isinstance(value, Mapping):
        return {name: gathered(part, keep=keep) for name, part in value.items()}
    if isinstance(value, list):
        return [gathered(part, keep=keep) for part in value]
    return value


def shard_state(optimizers: Mapping[str, torch.optim.Optimizer]) -> None:
    """Spreads the whole state that optimisers were given, as their parameters are; scalars stay everywhere."""
    for optimizer in optimizers.values():
        for parameter, state in optimizer.state.items():
            for name, value in state.items():
                if isinstance(value, torch.Tensor) and value.shape == parameter.shape:
                    state[name] = _like(value, parameter)


class ShardedMuon(Muon):
    """Muon whose matrices are sharded.

    The momentum is sharded too. Its direction needs whole matrices: each is gathered in turn, and orthogonalised in
    every process. (PyTorch's own Muon takes sharded matrices, but sums their products in bfloat16 over the processes,
    in another order for every number of them: the direction differs by some percent.)
    """

    def _whole(self, direction: Any) -> torch.Tensor:
        whole: torch.Tensor = direction.full_tensor()
        return whole

    def _part(self, change: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
        return _like(change, parameter)


def _like(whole: torch.Tensor, parameter: Any) -> torch.Tensor:
    """This process's part of a tensor that all processes have whole, as a parameter is sharded."""
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)


@functools.cache
def _make_outcomes_visible() -> None:
    """Lets FSDP find the loss in what a head returns; some versions of PyTorch do not look into dataclasses."""
    import torch.export

    torch.export.register_dataclass(Outcome)
