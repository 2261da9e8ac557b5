"""Runs of stages: folders and manifests, hashes of inputs, atomic files, trackers."""
