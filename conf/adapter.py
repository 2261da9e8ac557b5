"""The names of an adapter's files in a model directory. Nothing is imported: settings need the names too."""

FOLDER = "adapter"
CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
HEAD = "head.safetensors"  # the previous-token head
