"""Model directories: weights, adapters, draft models, tensor parallelism."""
