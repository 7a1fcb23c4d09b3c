"""Drafting methods, one file each, behind one protocol."""

from ...graphs import DecodeState
from ...kernels.window import Window
from .base import BaseSpeculator
from .custom import check_custom, speculator_class
from .registry import SpeculatorParts, create_speculator
from .stepwise import StepwiseSpeculator

__all__ = [
    "BaseSpeculator",
    "DecodeState",
    "SpeculatorParts",
    "StepwiseSpeculator",
    "Window",
    "check_custom",
    "create_speculator",
    "speculator_class",
]
