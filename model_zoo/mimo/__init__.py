"""MiMo: Qwen2 with layers for multi-token prediction, which belong to a drafter."""
