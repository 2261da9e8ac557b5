"""Several processes on one model, under torchrun: the library's tensor parallelism.

Every rank holds its share of each layer's heads and runs the whole loop on the same
tokens (engine/forward.py). A draft model is whole on every rank (draft.py). Benchmarks
differ, unless tensor_parallel=true: each process has a whole model and its own prompts
(`stand_alone`).
"""

import atexit

import torch.distributed as dist
from transformers import PretrainedConfig
from transformers.distributed import DistributedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from conf.architecture import cache_sizes
from conf.console import torchrun_rank
from conf.errors import UserError

_alone = False


def stand_alone() -> None:
    """From now on load whole models in each process of torchrun."""
    global _alone
    _alone = True


def processes() -> int:
    """Return the number of processes that share a model; 1 without torchrun."""
    return 1 if _alone else torchrun_rank()[1]


def plan(config: PretrainedConfig, ranks: int) -> DistributedConfig:
    """Return how the model is divided. Raises UserError if `ranks` cannot divide it.

    The head stays whole: its rows are read one by one for float32 logits (pick.py).
    """
    if not config.base_model_tp_plan or type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UserError(
            f"torchrun: a model that Transformers can divide over {ranks} processes is "
            f"needed, got {config.model_type}, which has no tensor parallel plan"
        )
    attention_heads: int = config.num_attention_heads
    heads, *_ = cache_sizes(config)
    if heads % ranks or attention_heads % ranks:
        raise UserError(
            f"torchrun: the number of processes must divide the model's {attention_heads} "
            f"heads and {heads} key-value heads, got {ranks}"
        )
    atexit.register(leave)
    return DistributedConfig(tp_size=ranks, tp_plan={"lm_head": "replicate"})


def leave() -> None:
    """End the process group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()
