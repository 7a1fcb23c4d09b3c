"""Rules that decide which drafts stand, one file each."""

from .base import VerificationPolicy
from .registry import create_policy, repeats_plain_text

__all__ = ["VerificationPolicy", "create_policy", "repeats_plain_text"]
