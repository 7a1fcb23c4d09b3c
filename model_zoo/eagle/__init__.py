"""EAGLE-1 and -2 (Li et al. 2024, arXiv 2401.15077 and 2406.16858): one decoder layer over embeddings and features."""
