"""The model's forwards with a key-value cache (prefill, forward, commit, drop), and the choice of tokens.

It depends on Transformers' models, and on no code of drafting.
"""
