"""Verification policies by the name of their `rejection_sample_method`."""

from __future__ import annotations

from ..errors import NotAvailableError
from .base import VerificationPolicy
from .coupled import CoupledVerification
from .standard import StandardVerification

_POLICIES: dict[str, type[VerificationPolicy]] = {
    policy.name: policy for policy in (StandardVerification, CoupledVerification)
}


def create_policy(name: str) -> VerificationPolicy:
    """The policy called `name`; raises `NotAvailableError` for one that this version does not implement."""
    if name not in _POLICIES:
        raise NotAvailableError(
            f"rejection_sample_method {name!r} is not implemented in this version; available: {', '.join(_POLICIES)}"
        )
    return _POLICIES[name]()
