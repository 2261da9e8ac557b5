"""Load model directories: weights, adapters, draft models, tensor parallelism."""
