"""config.json and generation_config.json of a model directory, from those that training wrote.

Pure: JSON in, JSON out. Nothing passes through the library's classes, so nothing can be lost in them.
"""

from collections.abc import Mapping
from typing import Any

MASK_KEYS = ("pard_token", "ptd_token_id")  # of servers with parallel drafting: TensorRT-LLM's and vLLM's


def served_config(
    described: Mapping[str, Any], *, architecture: str, dtype: str, mask_id: int | None
) -> dict[str, Any]:
    """The configuration under every name that the readers have for it; `mask_id` is the one adaptive id.

    Without `auto_map`: the weights are of the library's own class, and no other code lies beside them.
    """
    config = {name: value for name, value in described.items() if name not in ("auto_map", *MASK_KEYS)}
    config |= {"architectures": [architecture], "dtype": dtype, "torch_dtype": dtype}
    config |= rope_of_transformers_4(described.get("rope_parameters") or {})
    return config if mask_id is None else {**config, **dict.fromkeys(MASK_KEYS, mask_id)}


def rope_of_transformers_4(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """The keys that Transformers 4 has for `rope_parameters`; none for parameters by layer type.

    It takes its default of 10,000 for a rope_theta that it does not find, and servers built on it do so too:
    the model loads, and drafts are no longer accepted. Transformers 5 reads both spellings.
    """
    if not parameters or any(isinstance(value, Mapping) for value in parameters.values()):
        return {}
    lifted = {name: parameters[name] for name in ("rope_theta", "partial_rotary_factor") if name in parameters}
    scaling = {name: value for name, value in parameters.items() if name not in lifted}
    plain = scaling.get("rope_type", "default") == "default"
    return {**lifted, "rope_scaling": None if plain else scaling}


def served_generation(described: Mapping[str, Any], *, bos: int, eos: int) -> dict[str, Any]:
    """The base model's settings of generation, with what opens and ends a text where they do not say it."""
    own = {name: value for name, value in described.items() if value is not None}
    return {**described, "bos_token_id": bos, "eos_token_id": eos, **own}
