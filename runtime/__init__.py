"""Engine, settings, scheduling, speculators, verification and the command line."""
