"""The graph API behind one small interface; nothing outside graphs/ touches it."""
