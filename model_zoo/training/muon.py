"""Muon, in the arithmetic that the device is fast at."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from ...kernels.device import has_fast_bfloat16


class Muon(torch.optim.Muon):
    """PyTorch's Muon (Jordan et al. 2024), scaled so that AdamW's rates hold (Liu et al. 2025, arXiv 2502.16982).

    The direction is orthogonalised in bfloat16, as there, but in float32 where the processor only emulates bfloat16:
    on such CPUs the products would take many times as long as all else of a small head's training. The iteration does
    not need the precision, so that both learn alike.
    """

    def __init__(self, params: Iterable[torch.nn.Parameter], *, lr: float, weight_decay: float = 0.0) -> None:
        super().__init__(params, lr=lr, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw")

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One update; `closure` must be None."""
        if closure is not None:
            raise ValueError("closures are not supported")
        for group in self.param_groups:
            rate, momentum = group["lr"], group["momentum"]
            for parameter in group["params"]:
                gradient = parameter.grad
                if gradient is None:
                    continue
                state = self.state[parameter]
                if "momentum_buffer" not in state:
                    state["momentum_buffer"] = torch.zeros_like(gradient)
                buffer = state["momentum_buffer"]
                buffer.lerp_(gradient, 1 - momentum)
                direction = self._whole(gradient.lerp(buffer, momentum) if group["nesterov"] else buffer)
                change = orthogonalised(direction, group) * (-0.2 * rate * math.sqrt(max(direction.shape)))
                parameter.mul_(1 - rate * group["weight_decay"])
                parameter.add_(self._part(change, parameter))

    def _whole(self, direction: torch.Tensor) -> torch.Tensor:
        """The matrix that is to be orthogonalised."""
        return direction

    def _part(self, change: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
        """What of a whole matrix lies where the parameter does."""
        return change


def orthogonalised(matrix: torch.Tensor, group: Mapping[str, Any]) -> torch.Tensor:
    """About `U V^T` of a matrix `U S V^T`, by Newton and Schulz's iteration in its quintic form.

    Args:
        matrix: [n, m], kept.
        group: an optimiser's, with `ns_coefficients`, `ns_steps` and `eps`.

    Returns:
        float32 [n, m], whose singular values lie about 1, between 0.5 and 1.5.
    """
    a, b, c = group["ns_coefficients"]
    dtype = torch.bfloat16 if has_fast_bfloat16(matrix.device) else torch.float32
    wide = (matrix.T if matrix.shape[0] > matrix.shape[1] else matrix).to(dtype)
    wide = wide / wide.norm().clamp(min=group["eps"])  # then no singular value is above 1
    for _ in range(group["ns_steps"]):
        gram = wide @ wide.T
        wide = torch.addmm(wide, torch.addmm(gram, gram, gram, beta=b, alpha=c), wide, beta=a)
    return (wide.T if matrix.shape[0] > matrix.shape[1] else wide).float()
