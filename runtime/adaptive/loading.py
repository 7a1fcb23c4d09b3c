"""What an engine's adaptive verification starts with: the kind of its evidence, and its costs."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch

from ...profiling.device_name import device_name
from ..cache import cache_directory
from ..engine_config import EngineConfig
from ..errors import ConfigError
from ..speculative_config import SpeculativeConfig
from ..speculative_methods import METHODS, Evidence, joint_evidence
from ..speculators import speculator_class
from .costs import CostTable, load_costs, save_costs
from .measure import costs_key, measure_costs

if TYPE_CHECKING:
    from ..core import EngineCore

logger = logging.getLogger(__name__)


def evidence_of(speculative: SpeculativeConfig) -> Evidence:
    """What the confidences of the config's methods say.

    Raises:
        ConfigError: adaptive verification is asked for, and a user's class says nothing.
    """
    kinds = []
    for name in speculative.methods:
        kind = METHODS[name].evidence
        if METHODS[name].user_class and speculative.speculator is not None:
            kind = speculator_class(speculative.speculator).evidence
            if speculative.enable_adaptive_verification and kind is Evidence.NONE:
                raise ConfigError(
                    "enable_adaptive_verification needs drafts with a confidence or a distribution, and speculator "
                    f"{speculative.speculator!r} gives neither: let the class fill in confidence and name its "
                    f"evidence, one of {', '.join(str(one) for one in Evidence if one is not Evidence.NONE)}"
                )
        kinds.append(kind)
    return joint_evidence(kinds)


def ready_costs(core: EngineCore, config: EngineConfig, speculative: SpeculativeConfig, *, model: str) -> CostTable:
    """The costs of the engine's rounds: as they were kept for this device and model, or measured now and kept.

    Args:
        core: of the engine; no request is under way.
        config: its settings.
        speculative: with the number of drafts.
        model: tells models apart.
    """
    widths, state = core.plan.widths, core.state
    key = costs_key(
        {
            "model": model,
            "device": device_name(state.device),
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
            "executor": core.own_executor.name,
            "dtype": config.torch_dtype,
            "compile": config.compile,
            "speculative": speculative.to_dict(),
            "context": state.shape.context,
            "widths": widths,
        }
    )
    path = cache_directory() / "costs" / f"{key}.json"
    found = load_costs(path, key)
    if found is not None and found.fits(widths, state.shape.num_drafts):
        return found
    logger.info("measuring what rounds cost, for adaptive verification")
    speculator = core.speculator
    assert speculator is not None  # adaptive verification needs one
    programs = dict(zip(reversed(core.plan.buckets), core.rounds(), strict=True))
    context = speculative.adaptive_profile_context_len
    costs = measure_costs(programs, widths, state, core.own_executor, context=context, admit=speculator.admit)
    save_costs(path, key, costs)
    return costs
