"""What the optimizer and DeepSpeed are told of a run. Pure: needs neither."""

from typing import Any

from torch import nn

from conf import UserError
from train.config import OptimizerConfig, TrainConfig


def parameter_groups(module: nn.Module, config: OptimizerConfig) -> list[dict[str, Any]]:
    """What is trained: weight decay for matrices; none for norms, biases and embeddings."""
    embeddings = {id(m.weight) for m in module.modules() if isinstance(m, nn.Embedding)}
    # peft's name for single rows of an embedding
    embeddings |= {id(p) for name, p in module.named_parameters() if "trainable_tokens" in name}
    trained = [p for p in module.parameters() if p.requires_grad]
    # ZeRO 3 may have taken a weight apart already: then it keeps its shape elsewhere.
    matrices = {id(p) for p in trained if len(getattr(p, "ds_shape", p.shape)) >= 2} - embeddings
    decayed = [p for p in trained if id(p) in matrices]
    plain = [p for p in trained if id(p) not in matrices]
    groups = [(decayed, config.weight_decay), (plain, 0.0)]
    return [{"params": params, "weight_decay": decay} for params, decay in groups if params]


def deepspeed_config(config: TrainConfig, *, ranks: int) -> dict[str, Any]:
    """The user's DeepSpeed settings with batch sizes and clipping filled in.

    Raises UserError for DeepSpeed's own writers of checkpoints.
    """
    if config.deepspeed.get("checkpoint", {}).get("writer"):
        # 0.19.8: the decoupled one cannot hand over what ZeRO 1 and 2 save, the fast one needs libaio.
        raise UserError(
            "deepspeed.checkpoint.writer: wanted no such setting, since checkpoints are written with "
            "checksums of their own"
        )
    if config.deepspeed.get("fp16", {}).get("enabled"):
        raise UserError("deepspeed.fp16: wanted bf16 or float32 (bf16.enabled=false), found fp16")
    if any(
        (config.zero.get(f"offload_{part}") or {}).get("device") == "nvme" for part in ("optimizer", "param")
    ):
        raise UserError("deepspeed.zero_optimization: wanted offloading to cpu, found nvme")
    return {
        **config.deepspeed,
        "train_batch_size": config.global_batch,
        "train_micro_batch_size_per_gpu": config.micro_batch,
        "gradient_accumulation_steps": config.accumulations(ranks),
        "gradient_clipping": config.optimizer.clip,
        "zero_allow_untested_optimizer": True,
    }
