"""A model directory in, tokens and reports out. Knows nothing of training but the exported files."""

from infer.api import Model, TextStep, generate, load
from infer.config import DecodeConfig, DraftConfig, Infill

__all__ = ["DecodeConfig", "DraftConfig", "Infill", "Model", "TextStep", "generate", "load"]
