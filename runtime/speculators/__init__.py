"""Drafting methods, one file each, behind one protocol."""

from .base import BaseSpeculator
from .registry import create_speculator

__all__ = ["BaseSpeculator", "create_speculator"]
