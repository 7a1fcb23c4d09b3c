"""Gemma 4, text: heads that differ by kind of layer, normed values, shared caches, and embeddings for every layer.

Norms multiply with their weight and also follow attention and feed-forward; keys may serve as values; the last layers
may read an earlier layer's cache; layers add a small embedding of their own; a mixture of experts may stand beside each
dense feed-forward. The text part of multimodal checkpoints loads too.
"""
