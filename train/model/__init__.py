"""The module that is trained: Transformers' model, its rows for adaptive ids, adapters, the loss on top."""
