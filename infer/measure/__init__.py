"""Decoders on prompts, timed, and such work divided over processes. What speed, quality, study and
gpu_check share.
"""
