"""A finished training folder -> a model directory that others can serve."""
