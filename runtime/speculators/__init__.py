"""Drafting methods, one file each, behind one protocol."""

from .base import BaseSpeculator
from .registry import SpeculatorParts, create_speculator

__all__ = ["BaseSpeculator", "SpeculatorParts", "create_speculator"]
