"""ERNIE 4.5, dense and with mixtures of experts: Llama with neighbouring rotary pairs, and routers that choose by a
biased softmax.
"""
