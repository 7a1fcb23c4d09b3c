"""Target models, one folder per family."""
