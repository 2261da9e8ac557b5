"""A model as four verbs (prefill, forward, commit, drop) and the choice of tokens. Knows the library's
models; knows no drafting.
"""
