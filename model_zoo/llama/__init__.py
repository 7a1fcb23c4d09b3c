"""Llama 2 and 3, and what follows their layout (SmolLM2, TinyLlama, ...): the shared decoder as it is."""
