"""DFlash (arXiv 2602.06036): one pass over a block of masks, with keys and values of the target's hidden states."""
