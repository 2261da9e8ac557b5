"""Runs: output folders and manifests of stages, hashes of inputs, atomic files, Weights & Biases."""
