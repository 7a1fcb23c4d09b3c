"""The model by which acceptance is estimated from a drafter's confidence: its features and its prediction.

`acceptance_k = sigmoid(omega * f + beta_k)` with `f = logit(confidence)`, held to [-40, 40]. The functions exist for
torch (the specification) and for NumPy; `estimate_acceptance.py` has those for Triton. All are sequences of IEEE
operations in one order (see `elementary.py`), so every backend has the same bits.
"""

from __future__ import annotations

import numpy as np
import torch

from .elementary import FloatArray, exp, exp_array, log, log_array

MOST_LOGIT = 40.0
"""Features and logits lie within plus and minus this."""
LEAST_CONFIDENCE = 1e-30
"""Smaller confidences count as this, which the bound of the feature makes no difference to."""


def cleaned(confidence: torch.Tensor) -> torch.Tensor:
    """The confidence held to [0, 1]; NaN counts as 0."""
    return torch.where(confidence > 0, confidence, 0.0).clamp_max(1.0)


def feature(confidence: torch.Tensor) -> torch.Tensor:
    """`logit(confidence)` within the bounds, of float32 in [0, 1]."""
    sure = confidence.clamp_min(LEAST_CONFIDENCE)
    rest = 1.0 - sure
    value = log(sure) - log(torch.where(rest > 0, rest, 1.0))
    return torch.where(rest > 0, value, MOST_LOGIT).clamp(-MOST_LOGIT, MOST_LOGIT)


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    """Of float32, held to [-40, 40] first."""
    return 1.0 / (1.0 + exp(-x.clamp(-MOST_LOGIT, MOST_LOGIT)))


def cleaned_array(confidence: FloatArray) -> FloatArray:
    """`cleaned` of a NumPy array."""
    kept: FloatArray = np.where(confidence > 0, confidence, np.float32(0.0))
    return np.minimum(kept, np.float32(1.0))


def feature_array(confidence: FloatArray) -> FloatArray:
    """`feature` of a NumPy array."""
    sure = np.maximum(confidence, np.float32(LEAST_CONFIDENCE))
    rest = np.float32(1.0) - sure
    certain = rest <= 0
    rest[certain] = 1.0
    value = log_array(sure) - log_array(rest)
    value[certain] = MOST_LOGIT
    return np.clip(value, np.float32(-MOST_LOGIT), np.float32(MOST_LOGIT))


def sigmoid_array(x: FloatArray) -> FloatArray:
    """`sigmoid` of a NumPy array."""
    weight = exp_array(-np.clip(x, np.float32(-MOST_LOGIT), np.float32(MOST_LOGIT)))
    return np.float32(1.0) / (np.float32(1.0) + weight)
