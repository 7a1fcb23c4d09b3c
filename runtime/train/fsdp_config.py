"""FSDP as accelerate's launcher configures it: what is taken from there, and what is refused."""

from __future__ import annotations

import os
from typing import Any

from ..errors import ConfigError


def check_fsdp_version() -> None:
    """Checks the version before accelerate reads the rest, which it does differently for each.

    Raises:
        ConfigError: FSDP is asked for in its first version.
    """
    version = os.environ.get("FSDP_VERSION", "1")
    if _asked_for() and version != "2":
        raise ConfigError(
            f"accelerate is configured for FSDP in version {version}; supported: version 2 (--fsdp_version 2, or "
            "fsdp_version: 2 in its config file)"
        )


def take_fsdp(accelerator: Any) -> None:
    """Checks accelerate's configuration of FSDP, and lets it hold on CPUs, where accelerate ignores it.

    Args:
        accelerator: accelerate's, of several processes or one; `is_fsdp2` says afterwards whether heads are sharded.

    Raises:
        ConfigError: something is configured that is not supported; names all of it.
    """
    from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin, disable_fsdp_ram_efficient_loading

    if accelerator.distributed_type == DistributedType.MULTI_CPU and _asked_for():
        accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin()
        accelerator.state.distributed_type = DistributedType.FSDP
    elif accelerator.distributed_type != DistributedType.FSDP:
        return
    plugin = accelerator.state.fsdp_plugin
    wrap = getattr(plugin.auto_wrap_policy, "__name__", None)
    refused = {
        "fsdp_version 1": plugin.fsdp_version != 2,
        "fsdp_auto_wrap_policy SIZE_BASED_WRAP": wrap == "size_based_auto_wrap_policy",
        "fsdp_transformer_layer_cls_to_wrap": bool(plugin.transformer_cls_names_to_wrap),
        "fsdp_offload_params": type(plugin.cpu_offload).__name__ == "CPUOffloadPolicy",
        "fsdp_activation_checkpointing": bool(plugin.activation_checkpointing),
        "fsdp_ignored_modules": plugin.ignored_modules is not None,
        "a parallelism_config": accelerator.parallelism_config is not None,
    }
    found = [name for name, here in refused.items() if here]
    if found:
        raise ConfigError(
            f"accelerate's FSDP is configured with {', '.join(found)}, which is not supported: a head is sharded as "
            "one piece, on the devices that it is trained on; leave it out"
        )
    # Otherwise transformers would load the target's weights in the first process alone.
    disable_fsdp_ram_efficient_loading()


def _asked_for() -> bool:
    return os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true"
