"""DeepSeek-V3 and R1: latent attention, and mixtures whose router chooses by biased sigmoids in groups of experts."""
