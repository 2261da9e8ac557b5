"""How servers read a model directory's config.json, each by the rule of its own code.

Written from the sources, in words of our own: vLLM 0.33.0, and TensorRT-LLM's main branch at 00679c66
(PARDForCausalLM) and 051edebb (PARDWorker), whose rule 1.4.0rc1's reference has too.
"""

from collections.abc import Mapping
from typing import Any


def vllm_mask_id(config: Mapping[str, Any]) -> int:
    """vllm/v1/spec_decode/llm_base_proposer.py, _init_parallel_drafting_params. Raises ValueError where there
    is none.
    """
    dflash = config.get("dflash_config")
    if dflash and "mask_token_id" in dflash:
        found = dflash["mask_token_id"]
    elif config.get("mask_token_id") is not None:
        found = config["mask_token_id"]
    else:
        named = [name for name in ("dspark_noise_token_id", "pard_token", "ptd_token_id") if name in config]
        if not named:
            raise ValueError("config.json: wanted a mask token for parallel drafting, found none")
        found = config[named[0]]
    return int(found)


def tensorrt_mask_id(config: Mapping[str, Any], mask_token_id: int | None = None) -> int:
    """tensorrt_llm/_torch/speculative/pard.py, prepare_1st_drafter_inputs, which asks PARDDecodingConfig; then
    tensorrt_llm/_torch/models/modeling_speculative.py, PARDForCausalLM. The last resort is no row of the model.
    """
    if mask_token_id is not None:
        return mask_token_id
    return int(config.get("pard_token", config.get("mask_token_id", config["vocab_size"])))
