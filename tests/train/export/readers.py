"""Read the mask token from a model directory's config.json as servers do.

The code follows the sources of vLLM 0.33.0, and of TensorRT-LLM's main branch at 00679c66
(PARDForCausalLM) and 051edebb (PARDWorker). The reference of TensorRT-LLM 1.4.0rc1 has the
same rule.
"""

from collections.abc import Mapping
from typing import Any


def vllm_mask_id(config: Mapping[str, Any]) -> int:
    """Follow vllm/v1/spec_decode/llm_base_proposer.py, _init_parallel_drafting_params."""
    dflash = config.get("dflash_config")
    if dflash and "mask_token_id" in dflash:
        return int(dflash["mask_token_id"])
    if config.get("mask_token_id") is not None:
        return int(config["mask_token_id"])
    for name in ("dspark_noise_token_id", "pard_token", "ptd_token_id"):
        if name in config:
            return int(config[name])
    raise ValueError(
        "config.json must have a mask token for parallel drafting, got none"
    )


def tensorrt_mask_id(
    config: Mapping[str, Any], mask_token_id: int | None = None
) -> int:
    """Follow tensorrt_llm/_torch/speculative/pard.py, prepare_1st_drafter_inputs, for `mask_token_id`.

    That is the value of PARDDecodingConfig. Without it, follow PARDForCausalLM in
    tensorrt_llm/_torch/models/modeling_speculative.py. Its default is not a row of the embedding.
    """
    if mask_token_id is not None:
        return mask_token_id
    return int(
        config.get("pard_token", config.get("mask_token_id", config["vocab_size"]))
    )
