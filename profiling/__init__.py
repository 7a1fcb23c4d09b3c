"""Ranges, timers and floors: where the time of a round goes, and how little it could be."""

from .device_rates import DeviceRates, load_rates, measure_rates
from .floor import (
    Efficiency,
    ModelSizes,
    RoundShape,
    StepCost,
    efficiency,
    forward_cost,
    ngram_cost,
    prefill_cost,
    round_costs,
    suffix_cost,
)
from .observer import Observer, Observers
from .sizes import LayerSizes
from .step_timer import StepEvent, StepTime, StepTimer, phase_seconds, total_calls, total_seconds

__all__ = [
    "DeviceRates",
    "Efficiency",
    "LayerSizes",
    "ModelSizes",
    "Observer",
    "Observers",
    "RoundShape",
    "StepCost",
    "StepEvent",
    "StepTime",
    "StepTimer",
    "efficiency",
    "forward_cost",
    "load_rates",
    "measure_rates",
    "ngram_cost",
    "phase_seconds",
    "prefill_cost",
    "round_costs",
    "suffix_cost",
    "total_calls",
    "total_seconds",
]
