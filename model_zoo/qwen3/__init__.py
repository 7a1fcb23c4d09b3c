"""Qwen3, dense: Llama with an RMSNorm on every query and key head, and optional sliding layers."""
