"""Qwen3-Next, its layers of full attention: gated heads, and mixtures whose shared expert is gated."""
