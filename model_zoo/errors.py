"""What goes wrong when a model is loaded."""

from __future__ import annotations


class CheckpointError(ValueError):
    """A checkpoint's files are incomplete, damaged, or disagree with its configuration."""


class UnsupportedModelError(ValueError):
    """The checkpoint is sound, but of a kind that is not implemented."""


class TrainingDataError(ValueError):
    """Examples, token counts or stored hidden states are malformed, do not fit together, or cannot be kept."""


class TrainingConfigError(ValueError):
    """An option of training is unknown or out of range."""
