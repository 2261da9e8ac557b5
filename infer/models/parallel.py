"""Several processes on one model, under torchrun: tensor parallel by the library's own means.

Measurements go the other way: each process has a whole model, and prompts of its own (distributed.py).

Every rank holds its share of each layer's heads and runs the whole loop on the same tokens (engine/forward.py).
A draft model is whole on every rank (draft.py).
"""

import atexit
import os

import torch.distributed as dist
from transformers import PretrainedConfig
from transformers.distributed import DistributedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from conf import UserError

_alone = False


def stand_alone() -> None:
    """Load whole models in each process that torchrun started, from now on."""
    global _alone
    _alone = True


def processes() -> int:
    """Return how many torchrun started to share a model; 1 without it."""
    return (
        int(os.environ.get("WORLD_SIZE", "1")) if _by_torchrun() and not _alone else 1
    )


def place() -> tuple[int, int, int]:
    """Return torchrun's rank, world size and local rank; 0, 1 and 0 without it."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    rank, world, local = (
        int(os.environ.get(name, "0")) if _by_torchrun() else 0 for name in names
    )
    return rank, max(1, world), local


def is_first() -> bool:
    """Return whether this process is the one that prints."""
    return not _by_torchrun() or int(os.environ.get("RANK", "0")) == 0


def _by_torchrun() -> bool:
    # Schedulers set WORLD_SIZE and RANK for a job of their own kind too.
    return "TORCHELASTIC_RUN_ID" in os.environ or "LOCAL_RANK" in os.environ


def plan(config: PretrainedConfig, ranks: int) -> DistributedConfig:
    """Return how the model is divided. Raises UserError where it cannot be, for so many ranks.

    The head stays whole: its rows are looked up one by one for the float32 logits (pick.py).
    """
    if not config.base_model_tp_plan or type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        kind = f"{config.model_type}, which has no tensor parallel plan"
        raise UserError(
            f"torchrun: the library must be able to divide the model over {ranks} processes, got {kind}"
        )
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    if heads % ranks or config.num_attention_heads % ranks:
        both = f"{config.num_attention_heads} heads and {heads} key-value heads"
        raise UserError(
            f"torchrun: the number of processes must divide the model's {both}, got {ranks}"
        )
    atexit.register(leave)
    return DistributedConfig(tp_size=ranks, tp_plan={"lm_head": "replicate"})


def leave() -> None:
    """End the process group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()
