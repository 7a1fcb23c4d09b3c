"""The processes that train one head together: one on a laptop, several through accelerate's launcher."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

from ..errors import ConfigError
from .fsdp_config import check_fsdp_version, take_fsdp

_Found = TypeVar("_Found")
_LONGEST_WAIT = timedelta(days=14)
"""The others wait while the first lets the target answer, or computes hidden states."""


def make_accelerator(device: str, batches_per_step: int) -> Any:
    """What runs the loop in all processes.

    Args:
        device: cpu, cuda, or auto, which is cuda where there is one.
        batches_per_step: which the processes must share evenly.

    Raises:
        ConfigError: the device is not there, the processes cannot share the batches, or are distributed in a way that
            is not supported.
    """
    import torch
    from accelerate import Accelerator
    from accelerate.utils import DistributedDataParallelKwargs, InitProcessGroupKwargs

    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device cuda cannot be used: PyTorch finds no GPU; accepted: cpu, auto")
    check_fsdp_version()
    # Of PyTorch, about what accelerate passes on.
    warnings.filterwarnings("ignore", message=".*broadcast_buffers.*deprecated", category=FutureWarning)
    accelerator = Accelerator(
        # Of the devices that accelerate knows, the engine has these two.
        cpu=device == "cpu" or not torch.cuda.is_available(),
        mixed_precision="no",
        kwargs_handlers=[
            InitProcessGroupKwargs(timeout=_LONGEST_WAIT),
            # The buffers are the target's, and every process has the same.
            DistributedDataParallelKwargs(broadcast_buffers=False),
        ],
    )
    take_fsdp(accelerator)
    kind = accelerator.distributed_type.value
    if kind not in ("NO", "MULTI_CPU", "MULTI_GPU", "FSDP"):
        raise ConfigError(f"accelerate is configured for {kind}; supported: one process, MULTI_CPU, MULTI_GPU, FSDP")
    if batches_per_step % accelerator.num_processes:
        raise ConfigError(
            f"--batches-per-step is {batches_per_step}, which {accelerator.num_processes} processes cannot share "
            f"evenly: use a multiple of {accelerator.num_processes}"
        )
    return accelerator


def first_alone(accelerator: Any, work: Callable[[], _Found]) -> _Found:
    """Lets the first process do some work, and the others repeat it once what it wrote is there."""
    if not accelerator.is_main_process:
        accelerator.wait_for_everyone()
        return work()
    found = work()
    accelerator.wait_for_everyone()
    return found
