"""Rules that decide which drafts stand, one file each."""

from .base import VerificationPolicy
from .registry import create_policy

__all__ = ["VerificationPolicy", "create_policy"]
