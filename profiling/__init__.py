"""Ranges, timers, floors and benchmarks."""
