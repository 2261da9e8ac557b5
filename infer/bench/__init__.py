"""Benchmarks of models and decoders."""
