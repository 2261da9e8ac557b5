"""Divide one model over the processes of torchrun, by Transformers' tensor parallelism.

Every rank has its share of each layer's heads and runs the whole loop on the same tokens
(engine/forward.py). A draft model is whole on every rank (draft.py). In benchmarks each
process has a whole model and its own prompts (`use_whole_models`), unless
tensor_parallel=true.
"""

import atexit

import torch.distributed as dist
from transformers import PretrainedConfig
from transformers.distributed import DistributedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from conf.architecture import cache_sizes
from conf.console import torchrun_rank
from conf.errors import UserError

_whole_models = False


def use_whole_models() -> None:
    """Make every process of torchrun load whole models from now on."""
    global _whole_models
    _whole_models = True


def processes() -> int:
    """Return the number of processes that share a model; 1 without torchrun."""
    return 1 if _whole_models else torchrun_rank()[1]


def plan(config: PretrainedConfig, ranks: int) -> DistributedConfig:
    """Return the plan that divides a model. Raises UserError if `ranks` cannot divide it.

    The head is whole on every rank, since pick.py reads single rows for float32 logits.
    """
    if not config.base_model_tp_plan or type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UserError(
            f"{config.model_type} has no tensor-parallel plan in Transformers to divide it over "
            f"{ranks} processes. Run it in one process."
        )
    attention_heads: int = config.num_attention_heads
    heads, *_ = cache_sizes(config)
    if heads % ranks or attention_heads % ranks:
        raise UserError(
            f"torchrun: the number of processes must divide the model's {attention_heads} "
            f"heads and {heads} key-value heads, got {ranks}. Change --nproc_per_node."
        )
    atexit.register(end_process_group)
    return DistributedConfig(tp_size=ranks, tp_plan={"lm_head": "replicate"})


def end_process_group() -> None:
    """End the process group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()
