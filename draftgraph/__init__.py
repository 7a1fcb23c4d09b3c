"""The front door: the public names."""
