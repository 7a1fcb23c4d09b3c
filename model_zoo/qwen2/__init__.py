"""Qwen2 and Qwen2.5: Llama with a bias on queries, keys and values, and optional sliding layers."""
