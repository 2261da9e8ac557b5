"""The names of files in a model directory with adaptive tokens. No imports, so that settings can use it."""

ADAPTIVE_FILE = "adaptive.json"  # describes the adaptive tokens
# The folder of a gated adapter, and the files in it
FOLDER = "adapter"
CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
HEAD = "head.safetensors"  # the previous-token head
