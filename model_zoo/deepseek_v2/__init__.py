"""DeepSeek-V2: latent attention, and mixtures that take the best of a softmax, perhaps in groups of experts."""
