"""Load a model directory, decode with it, and measure it. It does not import the training code."""

from typing import TYPE_CHECKING, Any

from infer.config import DecodeConfig, Infill

if TYPE_CHECKING:
    from infer.api import Model, TextStep, generate, load

__all__ = [
    "DecodeConfig",
    "Infill",
    "Model",
    "TextStep",
    "generate",
    "load",
]


def __getattr__(name: str) -> Any:
    """Import the names that need PyTorch on first use (PEP 562): reading settings does not need it."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from infer import api

    return getattr(api, name)
