"""Qwen3 with a mixture of experts in most layers: the best of a softmax over all, weighted anew or not."""
