"""DSpark: DFlash's block, a Markov head by which a draft depends on the one before, and a confidence head."""
