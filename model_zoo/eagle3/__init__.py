"""EAGLE-3 (Li et al. 2025, arXiv 2503.01840), 3.1 and P-EAGLE: layers over embeddings and several hidden states."""
