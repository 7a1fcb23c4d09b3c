"""Gemma 4's assistants: small decoders that have queries alone and read the keys and values of the target.

Each draft pairs the target's embedding of the token drafted last with a hidden state of the target's size, the target's
own at first and then what the assistant projects back. All drafts of a round stand at one position and see the same
keys and values.
"""
