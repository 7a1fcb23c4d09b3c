"""Training of draft heads: what the heads of all methods share. Each head's own part lies beside it."""
