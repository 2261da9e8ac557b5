"""DeepSpeed, and nothing else that knows it: start, step, checkpoints, conversion.

Knows how a module is trained on several ranks; knows no objective and no data.
"""

import contextlib
import io
import os
import resource
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from conf import UserError
from train.config import OptimizerConfig, TrainConfig

if not torch.cuda.is_available():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # read when deepspeed is imported

# DeepSpeed's own calls of torch names that are on their way out: nothing that a user can mend.
warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
os.environ.setdefault("DEEPSPEED_LOG_LEVEL", "warning")

import deepspeed
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint


class Engine:
    """One rank's share of the training engine."""

    def __init__(self, module: nn.Module, config: TrainConfig) -> None:
        optimizer = torch.optim.AdamW(
            parameter_groups(module, config.optimizer),
            lr=config.optimizer.lr,
            betas=(config.optimizer.beta1, config.optimizer.beta2),
            fused=True,
        )
        self._engine, *_ = deepspeed.initialize(
            model=module, optimizer=optimizer, config=deepspeed_config(config, ranks=world_size())
        )

    @property
    def device(self) -> torch.device:
        """Where batches belong."""
        return self._engine.device

    def forward(self, batch: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
        """The module's loss, tally and likeliest tokens of one micro-batch."""
        return self._engine(**batch)

    def step(self, batches: list[dict[str, Any]], lr: float) -> Tensor:
        """One optimizer step over the micro-batches of this rank; returns the summed tally."""
        for group in self._engine.optimizer.param_groups:
            group["lr"] = lr
        tallies = []
        for batch in batches:
            loss, tally, _ = self.forward(batch)
            self._engine.backward(loss)
            self._engine.step()
            tallies.append(tally)
        return torch.stack(tallies).sum(0)

    def gradient_norm(self) -> float:
        """Before clipping, of the last step."""
        return float(self._engine.get_global_grad_norm() or 0.0)

    def peak_memory(self) -> int:
        """Bytes: the most that the GPU held, or on a CPU the process."""
        if torch.cuda.is_available():
            return torch.cuda.max_memory_allocated()
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    def save(self, folder: Path, tag: str, state: dict[str, Any]) -> None:
        """Write a checkpoint; `latest` names it once it is whole."""
        self._engine.save_checkpoint(str(folder), tag=tag, client_state=state)

    def load(self, folder: Path) -> dict[str, Any]:
        """Continue from the latest checkpoint; returns the state given to `save`."""
        path, state = self._engine.load_checkpoint(str(folder))
        if path is None:
            raise UserError(f"out: {folder} holds no checkpoint that this configuration can continue from")
        return state


def start() -> tuple[int, int]:
    """Join the ranks that torchrun started, or be the only one; returns (rank, ranks)."""
    for name, value in {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_PORT": 29517}.items():
        os.environ.setdefault(name, str(value))
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    # Used by DeepSpeed's inference alone, and would be compiled here: a minute, and a C++ compiler.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend="nccl" if torch.cuda.is_available() else "gloo", verbose=False)
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    return torch.distributed.get_rank(), world_size()


def world_size() -> int:
    """The number of ranks."""
    return torch.distributed.get_world_size()


def whole(*modules: nn.Module) -> contextlib.AbstractContextManager[None]:
    """While the block lasts, these modules' own weights are in one piece, where ZeRO 3 has divided them."""
    return deepspeed.zero.GatheredParameters([p for m in modules for p in m.parameters(recurse=False)])


def parameter_groups(module: nn.Module, config: OptimizerConfig) -> list[dict[str, Any]]:
    """What is trained: weight decay for matrices; none for norms, biases and embeddings."""
    embeddings = {id(m.weight) for m in module.modules() if isinstance(m, nn.Embedding)}
    # peft's name for single rows of an embedding
    embeddings |= {id(p) for name, p in module.named_parameters() if "trainable_tokens" in name}
    trained = [p for p in module.parameters() if p.requires_grad]
    decayed = [p for p in trained if p.ndim >= 2 and id(p) not in embeddings]
    plain = [p for p in trained if p.ndim < 2 or id(p) in embeddings]
    groups = [(decayed, config.weight_decay), (plain, 0.0)]
    return [{"params": params, "weight_decay": decay} for params, decay in groups if params]


def deepspeed_config(config: TrainConfig, *, ranks: int) -> dict[str, Any]:
    """The user's DeepSpeed settings with batch sizes and clipping filled in."""
    return {
        **config.deepspeed,
        "train_batch_size": config.global_batch,
        "train_micro_batch_size_per_gpu": config.micro_batch,
        "gradient_accumulation_steps": config.accumulations(ranks),
        "gradient_clipping": config.optimizer.clip,
        "zero_allow_untested_optimizer": True,
    }


def full_weights(folder: Path) -> dict[str, Tensor]:
    """The weights of a checkpoint of any ZeRO stage, by parameter name; float32 if they were trained."""
    # The library prints what it finds, and a progress bar of its own.
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        trained = get_fp32_state_dict_from_zero_checkpoint(str(folder))
    return frozen_weights(folder / (folder / "latest").read_text().strip()) | trained


def frozen_weights(checkpoint: Path) -> dict[str, Tensor]:
    """The model's own copy of its weights, which ZeRO 1 leaves frozen ones in; empty for ZeRO 3."""
    path = checkpoint / "mp_rank_00_model_states.pt"
    return torch.load(path, map_location="cpu", weights_only=False)["module"] if path.is_file() else {}
