"""Training of draft heads on what a frozen target writes."""
