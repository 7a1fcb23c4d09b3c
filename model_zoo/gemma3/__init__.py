"""Gemma 3, text: the shared decoder with other choices.

Norms multiply with one plus their weight and also follow attention and feed-forward; query and key heads are
normed; embeddings are scaled by the square root of the hidden size; five of six layers slide, with a rotary
base of their own. The text part of multimodal checkpoints loads too.
"""
