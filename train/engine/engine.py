"""DeepSpeed: start, step, checkpoints. Only this, partitions.py and universal.py know it.

Knows how a module is trained on several ranks; knows no objective and no data.
"""

import os
import resource
import socket
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import Tensor, nn

from conf import UserError
from train.config import TrainConfig
from train.engine.chance import reseed
from train.engine.checkpoint import why_unread, write_file
from train.engine.ranks import world_size
from train.engine.settings import deepspeed_config, parameter_groups

if not torch.cuda.is_available():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # read when deepspeed is imported

# DeepSpeed's own calls of torch names that are on their way out: nothing that a user can mend.
warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
os.environ.setdefault("DEEPSPEED_LOG_LEVEL", "warning")

# `torch.load` runs no pickle then, here and in child processes: it overrules DeepSpeed's `weights_only=False`.
os.environ["TORCH_FORCE_WEIGHTS_ONLY_LOAD"] = "1"
os.environ.pop("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", None)

import deepspeed
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointEngine
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.fp16.loss_scaler import LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address

# All that our checkpoints hold beside tensors and plain values.
torch.serialization.add_safe_globals([ZeroStageEnum, LossScaler, fragment_address])


def check_settings(settings: Mapping[str, Any]) -> None:
    """Raise UserError for the first of the user's settings that DeepSpeed would not take."""
    least = {"train_batch_size": 1}
    defaults = DeepSpeedConfig(dict(least))
    for name, value in settings.items():
        default = getattr(defaults, name, None)  # DeepSpeed checks no plain value
        kind, words = (bool, "true or false") if isinstance(default, bool) else ((int, float), "a number")
        if isinstance(default, int | float) and not isinstance(value, kind):
            raise UserError(f"deepspeed.{name} must be {words}, got {value}.")
        try:
            DeepSpeedConfig({**least, name: value})
        except Exception as error:  # pydantic's, its own, or what Python meets in a value of another type
            lines = str(error).splitlines()
            # pydantic: how many errors there are, then each setting and what is wrong with it
            reason = " ".join(line.strip() for line in lines[1:3] or lines)
            raise UserError(f"deepspeed.{name} must be what DeepSpeed takes, got {value}: {reason}") from error


class Abandoned(Exception):
    """A step was ended before it had changed weights or optimizer; it is to be followed by no other."""


class Engine:
    """One rank's share of the training engine.

    With `universal`, `load` takes what `to_universal` made, for any number of ranks.
    """

    def __init__(self, module: nn.Module, config: TrainConfig, *, universal: bool = False) -> None:
        groups = parameter_groups(module, config.optimizer)
        names = {id(parameter): name for name, parameter in module.named_parameters()}
        self._trained = [[names[id(parameter)] for parameter in group["params"]] for group in groups]
        optimizer = torch.optim.AdamW(
            groups,
            lr=config.optimizer.lr,
            betas=(config.optimizer.beta1, config.optimizer.beta2),
            fused=True,
        )
        settings = deepspeed_config(config, ranks=world_size())
        if universal:
            settings["checkpoint"] = {**settings.get("checkpoint", {}), "load_universal": True}
        exact = {name: buffer.clone() for name, buffer in module.named_buffers()}
        self._engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=settings)
        # DeepSpeed rounds buffers to bfloat16 too: of rotary frequencies that is 3 rad at position 16,000.
        for name, buffer in module.named_buffers():
            buffer.data = exact[name].to(buffer.device)
        self._forget_first_step()
        self._files = _Files()
        self._engine.checkpoint_engine = self._files
        # A copy of a script that nobody needs, made by rank 0 alone: on a full disk the others would wait.
        self._engine._copy_recovery_script = lambda folder: None
        self._gradient_norm = 0.0

    @property
    def device(self) -> torch.device:
        """Where batches belong."""
        return self._engine.device

    def forward(self, batch: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
        """The module's loss, tally and likeliest tokens of one micro-batch."""
        return self._engine(**batch)

    def step(
        self,
        batches: list[dict[str, Any]],
        lr: float,
        *,
        key: Sequence[int],
        stop: Callable[[], bool] = lambda: False,
    ) -> tuple[Tensor, Tensor]:
        """One optimizer step over this rank's m micro-batches: their losses (m,), their summed tally.

        Raises Abandoned where `stop`, which is asked between micro-batches and must say the same on every
        rank, says so. `key` and the number of a micro-batch within the global batch seed its random state: a
        checkpoint needs none, and the number of ranks changes nothing.
        """
        for group in self._engine.optimizer.param_groups:
            group["lr"] = lr
        losses, tallies = [], []
        for index, batch in enumerate(batches):
            if index and stop():
                raise Abandoned
            reseed(*key, index * world_size() + torch.distributed.get_rank())
            loss, tally, _ = self.forward(batch)
            self._engine.backward(loss)
            if self._is_plain and index == len(batches) - 1:
                gradients = [p.grad for p in self._engine.module.parameters() if p.grad is not None]
                self._gradient_norm = float(torch.nn.utils.get_total_norm(gradients))
            self._engine.step()
            losses.append(loss.detach().float())
            tallies.append(tally)
        return torch.stack(losses), torch.stack(tallies).sum(0)

    @property
    def stage(self) -> int:
        """Of ZeRO."""
        return int(self._engine.zero_optimization_stage())

    def gradient_norm(self) -> float:
        """Before clipping, of the last step; infinite when the engine skipped it."""
        if self._is_plain:
            return self._gradient_norm
        return float(self._engine.get_global_grad_norm() or 0.0)

    def device_name(self) -> str:
        """As the maker calls it; "cpu" for a CPU."""
        return torch.cuda.get_device_name(self.device) if torch.cuda.is_available() else "cpu"

    def peak_memory(self) -> int:
        """Bytes: the most that the GPU held, or on a CPU the process."""
        if torch.cuda.is_available():
            return torch.cuda.max_memory_allocated()
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    def weight_norm(self) -> float:
        """Of all weights. Called by every rank."""
        squares = 0.0
        for parameter in self._engine.module.parameters():
            with deepspeed.zero.GatheredParameters([parameter], enabled=hasattr(parameter, "ds_id")):
                squares += float(parameter.detach().double().square().sum())
        return squares**0.5

    def save(self, folder: Path, tag: str) -> tuple[dict[str, dict[str, int]], OSError | None]:
        """Write weights and optimizer into `folder`/`tag`. Called by every rank.

        Returns size and CRC-32 of the files that this rank wrote, by name, and why one could not
        be written.
        """
        self._files.begin()
        # The names say whose the float32 copies are that stage 0 keeps of bfloat16 weights.
        named = {"trained": self._trained}
        self._engine.save_checkpoint(str(folder), tag=tag, client_state=named, save_latest=False)
        return self._files.written, self._files.failure

    def load(self, folder: Path, tag: str) -> None:
        """Continue from the weights and the optimizer in `folder`/`tag`. Called by every rank."""
        optimizer = self._engine.basic_optimizer
        settings = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
        path, _ = self._engine.load_checkpoint(str(folder), tag=tag)
        if path is None:
            raise FileNotFoundError(f"{folder / tag}: no checkpoint of this engine")
        # From a universal checkpoint ZeRO 3 gives every group the settings of the first, weight decay
        # too, and all parameters one count of steps, which each of them then raises.
        for group, setting in zip(optimizer.param_groups, settings, strict=True):
            group.update(setting)
        for parameter, state in optimizer.state.items():
            if isinstance(state.get("step"), Tensor):
                # On the parameter's device too: the converter's files were made on a CPU.
                state["step"] = state["step"].to(parameter.device, copy=True)

    @property
    def _is_plain(self) -> bool:
        """Without ZeRO and in float32: then the optimizer is PyTorch's own and tells no norm."""
        return isinstance(self._engine.optimizer, torch.optim.Optimizer)

    def _forget_first_step(self) -> None:
        """Undo the step on zero gradients by which stage 0 in bfloat16 makes its optimizer's state:
        it decays the weights, and Adam would take the true first step for the second.
        """
        optimizer = self._engine.optimizer
        if type(optimizer).__name__ == "FP16_UnfusedOptimizer":
            optimizer.refresh_fp32_params()
            optimizer.optimizer.state.clear()


class _Files(CheckpointEngine):
    """PyTorch's files, with the CRC-32 of what was meant to be written.

    A failure is kept, not raised: the ranks meet after writing, and all of them must come.
    """

    def begin(self) -> None:
        """Forget the files of the checkpoint before."""
        self.written: dict[str, dict[str, int]] = {}
        self.failure: OSError | None = None

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        try:
            os.makedirs(path, exist_ok=True)
        except OSError as error:
            self.failure = self.failure or error

    def save(self, state_dict: Any, path: str) -> None:
        if self.failure is None:
            try:
                self.written[Path(path).name] = write_file(state_dict, Path(path))
            except OSError as error:
                self.failure = error

    def load(self, path: str, map_location: Any = None) -> Any:
        # A checkpoint may come from anywhere: a pickle of anything else is refused, not run.
        try:
            return torch.load(path, map_location=map_location, weights_only=True)
        except UnpicklingError as error:
            raise UserError(f"{path}: wanted tensors and plain values, found {why_unread(error)}") from error

    def create(self, info: Any) -> None:
        pass

    def commit(self, info: Any) -> bool:
        return True


def start() -> tuple[int, int]:
    """Join the ranks that torchrun started, or be the only one; returns (rank, ranks)."""
    for name, value in {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1"}.items():
        os.environ.setdefault(name, str(value))
    if "MASTER_PORT" not in os.environ:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            os.environ["MASTER_PORT"] = str(free.getsockname()[1])
    # Used by DeepSpeed's inference alone, and would be compiled here: a minute, and a C++ compiler.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend="nccl" if torch.cuda.is_available() else "gloo", verbose=False)
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    return torch.distributed.get_rank(), world_size()
