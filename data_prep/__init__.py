"""Convert source files to packed token shards. Imports neither PyTorch nor a model."""
