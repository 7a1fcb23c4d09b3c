"""Medusa (Cai et al. 2024, arXiv 2401.10774): heads beside the target's, each for a token further on."""
