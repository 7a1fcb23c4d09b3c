"""Mistral 7B and its kin: Llama with, in some versions, a sliding window on every layer."""
