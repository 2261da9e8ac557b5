"""How servers read a model directory's config.json.

Rewritten from their sources: vLLM 0.33.0, and TensorRT-LLM's main branch at 00679c66
(PARDForCausalLM) and 051edebb (PARDWorker), whose rule 1.4.0rc1's reference has too.
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
    """Follow tensorrt_llm/_torch/speculative/pard.py, prepare_1st_drafter_inputs (PARDDecodingConfig's value),
    then tensorrt_llm/_torch/models/modeling_speculative.py, PARDForCausalLM. Its last resort is no row.
    """
    if mask_token_id is not None:
        return mask_token_id
    return int(
        config.get("pard_token", config.get("mask_token_id", config["vocab_size"]))
    )
