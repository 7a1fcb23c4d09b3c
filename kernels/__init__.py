"""One file per op: the eager reference, the CPU implementation where it differs, the registration."""
