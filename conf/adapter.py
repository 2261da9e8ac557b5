"""The names of an adapter's files in a model directory. It has no imports, so that settings can use it."""

FOLDER = "adapter"
CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
HEAD = "head.safetensors"  # the previous-token head
