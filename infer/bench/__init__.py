"""Measure models and decoders: speed, quality, GSD's tables, load."""
