"""DeepSpeed: start, steps, checkpoints, weights partitioned over ranks.

Importing this module sets environment variables that DeepSpeed and PyTorch read.
"""

import contextlib
import os
import random
import resource
import socket
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers.integrations import HfDeepSpeedConfig

from conf.errors import UserError, in_one_line
from train.checkpoint import why_unread, write_file, zero_stage
from train.config import TrainConfig
from train.distributed import COLLECTIVE_TIMEOUT, Abandoned
from train.optimizer import build_optimizer, parameter_groups

if not torch.cuda.is_available():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # read when deepspeed is imported

# DeepSpeed calls deprecated functions of PyTorch.
warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
os.environ.setdefault("DEEPSPEED_LOG_LEVEL", "warning")

# `torch.load` then runs no pickle, here and in child processes: this overrules the
# argument `weights_only=False` of DeepSpeed's own calls.
os.environ["TORCH_FORCE_WEIGHTS_ONLY_LOAD"] = "1"
os.environ.pop("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", None)

import deepspeed
import torch.distributed as dist
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointEngine
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.fp16.loss_scaler import LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs
from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs
from deepspeed.utils.tensor_fragment import fragment_address

RANKS_PER_MACHINE = 8

# All classes in our checkpoints beside tensors and plain values. `partial` makes another
# object of the function: PyTorch forgets the one of train.checkpoint.KNOWN after a use.
named = partial(zero_stage), "builtins.getattr"
torch.serialization.add_safe_globals(
    [ZeroStageEnum, LossScaler, fragment_address, named]
)


def start() -> tuple[int, int]:
    """Join the ranks that torchrun started, or be the only one; return (rank, ranks)."""
    for name, value in {
        "RANK": 0,
        "LOCAL_RANK": 0,
        "WORLD_SIZE": 1,
        "MASTER_ADDR": "127.0.0.1",
    }.items():
        os.environ.setdefault(name, str(value))
    if "MASTER_PORT" not in os.environ:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            os.environ["MASTER_PORT"] = str(free.getsockname()[1])
    # For DeepSpeed's inference alone; it would be compiled here.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(
        dist_backend="nccl" if torch.cuda.is_available() else "gloo",
        timeout=COLLECTIVE_TIMEOUT,
        verbose=False,
    )
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    return dist.get_rank(), dist.get_world_size()


def check_settings(settings: Mapping[str, Any]) -> None:
    """Raise UserError for the first of the user's settings that DeepSpeed refuses."""
    for name, value in settings.items():
        try:
            DeepSpeedConfig({"train_batch_size": 1, name: value})
        except Exception as error:  # of pydantic, of DeepSpeed, or of Python
            raise UserError(
                f"deepspeed.{name} must be valid for DeepSpeed, got {value}: "
                f"{in_one_line(error)}"
            ) from error


def deepspeed_config(config: TrainConfig, *, ranks: int) -> dict[str, Any]:
    """Return the user's DeepSpeed settings with batch sizes and clipping filled in."""
    return {
        **config.deepspeed,
        "bf16": {"enabled": config.bf16},
        "train_batch_size": config.global_batch,
        "train_micro_batch_size_per_gpu": config.micro_batch,
        "gradient_accumulation_steps": config.accumulations(ranks),
        "gradient_clipping": config.optimizer.clip,
        "zero_allow_untested_optimizer": True,
        # PyTorch's own AdamW: DeepSpeed's for CPUs would be compiled here.
        "zero_force_ds_cpu_optimizer": False,
    }


def model_states(
    total: int, trained: int, largest: int, config: TrainConfig, *, ranks: int
) -> tuple[int, int]:
    """Return bytes of a rank's GPU, and of its machine, by DeepSpeed's estimators.

    Counts weights, gradients and optimizer of `trained` parameters, and the weights of
    the other ones of `total`. `largest` is the parameters of the largest module. The
    estimators are for bfloat16 and know ZeRO 2 and 3: float32 takes 2 bytes more for a
    weight, and below stage 2 every rank has all gradients.
    """
    local = min(ranks, RANKS_PER_MACHINE)
    offload = config.zero.get("offload_optimizer") is not None
    if config.stage == 3:
        host, device, _ = estimate_zero3_model_states_mem_needs(
            trained,
            largest,
            num_gpus_per_node=local,
            num_nodes=ranks // local,
            cpu_offload=offload,
            cpu_offload_params=config.zero.get("offload_param") is not None,
        )
        held = (total - trained) / ranks
    else:
        divided = ranks if config.stage else 1
        host, device = estimate_zero2_model_states_mem_needs(
            trained,
            num_gpus_per_node=min(divided, local),
            num_nodes=max(1, divided // local),
            cpu_offload=offload,
        )
        held = total - trained
        if config.stage == 1:
            device += 2 * trained
    wide = 0 if config.bf16 else 2
    weights = total / ranks if config.stage == 3 else total
    return int(device + 2 * held + wide * weights), host if offload else 0


@contextlib.contextmanager
def load_partitioned(config: TrainConfig) -> Iterator[None]:
    """Partition every weight as it loads, within the block, under ZeRO 3."""
    alive = None
    if config.stage == 3 and not config.model.random_init:
        # Transformers looks for a living object of this kind.
        alive = HfDeepSpeedConfig(deepspeed_config(config, ranks=dist.get_world_size()))
    yield
    del alive


@contextlib.contextmanager
def gathered(*modules: nn.Module) -> Iterator[None]:
    """Join these modules' own weights, within the block, where ZeRO 3 partitions them.

    Changes by rank 0 are kept.
    """
    parameters = [p for module in modules for p in module.parameters(recurse=False)]
    with deepspeed.zero.GatheredParameters(parameters, modifier_rank=0):
        yield


def count_parameters(module: nn.Module) -> int:
    """Count the parameters of the whole module, also where ZeRO 3 partitions it."""
    return sum(
        getattr(parameter, "ds_numel", parameter.numel())
        for parameter in module.parameters()
    )


def reseed(*key: int) -> None:
    """Seed PyTorch on every device, NumPy and Python from the numbers of `key`, each
    from 0.

    Random states are a function of the step, so that no checkpoint has to contain them.
    """
    seed = int(np.random.SeedSequence(key).generate_state(1, np.uint64)[0])
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


class Engine:
    """One rank's share of the training engine.

    With `universal`, `load` reads files of `train.checkpoint.to_universal`, on any
    number of ranks.
    """

    def __init__(
        self, module: nn.Module, config: TrainConfig, *, universal: bool = False
    ) -> None:
        groups = parameter_groups(module, config.optimizer)
        names = {id(parameter): name for name, parameter in module.named_parameters()}
        self._trained = [
            [names[id(parameter)] for parameter in group["params"]] for group in groups
        ]
        optimizer = build_optimizer(groups, config.optimizer)
        settings = deepspeed_config(config, ranks=dist.get_world_size())
        if universal:
            settings["checkpoint"] = {
                **settings.get("checkpoint", {}),
                "load_universal": True,
            }
        exact = {name: buffer.clone() for name, buffer in module.named_buffers()}
        self._engine: Any
        self._engine, *_ = deepspeed.initialize(
            model=module, optimizer=optimizer, config=settings
        )
        # DeepSpeed rounds buffers to bfloat16 too: at position 16,000 rotary
        # frequencies would be off by 3 rad.
        for name, buffer in module.named_buffers():
            buffer.data = exact[name].to(buffer.device)
        self._forget_first_step()
        self._files = _Files()
        self._engine.checkpoint_engine = self._files
        # DeepSpeed copies a script beside the weights; on a full disk ranks would wait.
        self._engine._copy_recovery_script = lambda folder: None
        self._gradient_norm = 0.0

    @property
    def device(self) -> torch.device:
        """The device of the batches."""
        device: torch.device = self._engine.device
        return device

    @property
    def stage(self) -> int:
        """The stage of ZeRO."""
        return int(self._engine.zero_optimization_stage())

    def forward(self, batch: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
        """Return the module's loss, tally and likeliest tokens of one micro-batch."""
        outputs: tuple[Tensor, Tensor, Tensor] = self._engine(**batch)
        return outputs

    def step(
        self,
        batches: list[dict[str, Any]],
        lr: float,
        *,
        key: Sequence[int],
        stop: Callable[[], bool] = lambda: False,
    ) -> tuple[Tensor, Tensor]:
        """Take one optimizer step over this rank's m micro-batches.

        Returns their losses (m,) and summed tally. Raises Abandoned if `stop` returns
        True: it is called between micro-batches and must return the same on every rank.
        `key` and the number of a micro-batch within the global batch seed its random
        state, so that the number of ranks changes nothing.
        """
        for group in self._engine.optimizer.param_groups:
            group["lr"] = lr * group["rate"]
        losses = []
        tallies = []
        for index, batch in enumerate(batches):
            if index and stop():
                raise Abandoned
            reseed(*key, index * dist.get_world_size() + dist.get_rank())
            loss, tally, _ = self.forward(batch)
            self._engine.backward(loss)
            if self._is_plain and index == len(batches) - 1:
                gradients = [
                    p.grad
                    for p in self._engine.module.parameters()
                    if p.grad is not None
                ]
                self._gradient_norm = float(torch.nn.utils.get_total_norm(gradients))
            self._engine.step()
            losses.append(loss.detach().float())
            tallies.append(tally)
        return torch.stack(losses), torch.stack(tallies).sum(0)

    def gradient_norm(self) -> float:
        """Return the gradient's norm in the last step, before clipping."""
        if self._is_plain:
            return self._gradient_norm
        return float(self._engine.get_global_grad_norm() or 0.0)

    def device_name(self) -> str:
        """Return the GPU's name as its maker gives it; "cpu" for a CPU."""
        return (
            torch.cuda.get_device_name(self.device)
            if torch.cuda.is_available()
            else "cpu"
        )

    def peak_memory(self) -> int:
        """Return the largest memory so far, in bytes: the GPU's, or a CPU process's."""
        if torch.cuda.is_available():
            return torch.cuda.max_memory_allocated()
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    def save(
        self, folder: Path, tag: str
    ) -> tuple[dict[str, dict[str, int]], OSError | None]:
        """Write weights and optimizer into `folder`/`tag`. Called by every rank.

        Returns size and CRC-32 of this rank's files, by name, and the error of a write.
        """
        self._files.written = {}
        self._files.failure = None
        # Stage 0 keeps float32 copies of bfloat16 weights in this order of names.
        state = {"trained": self._trained}
        self._engine.save_checkpoint(
            str(folder), tag=tag, client_state=state, save_latest=False
        )
        return self._files.written, self._files.failure

    def load(self, folder: Path, tag: str) -> None:
        """Continue from the weights and the optimizer in `folder`/`tag`. Called by
        every rank.
        """
        optimizer = self._engine.basic_optimizer
        settings = [
            {k: v for k, v in group.items() if k != "params"}
            for group in optimizer.param_groups
        ]
        path, _ = self._engine.load_checkpoint(str(folder), tag=tag)
        if path is None:
            raise FileNotFoundError(f"{folder / tag}: no checkpoint of this engine")
        # From a universal checkpoint ZeRO 3 gives every group the first group's
        # settings and all parameters one count of steps, which each of them then
        # increments.
        for group, setting in zip(optimizer.param_groups, settings, strict=True):
            group.update(setting)
        for parameter, state in optimizer.state.items():
            if isinstance(state.get("step"), Tensor):
                # On the parameter's device: the converter writes CPU tensors.
                state["step"] = state["step"].to(parameter.device, copy=True)

    @property
    def _is_plain(self) -> bool:
        """Whether the optimizer is PyTorch's own (no ZeRO, float32), which has no norm."""
        return isinstance(self._engine.optimizer, torch.optim.Optimizer)

    def _forget_first_step(self) -> None:
        """Undo the step on zero gradients by which stage 0 in bfloat16 starts.

        It decays the weights, and Adam would count the first real step as the second.
        """
        optimizer = self._engine.optimizer
        if type(optimizer).__name__ == "FP16_UnfusedOptimizer":
            optimizer.refresh_fp32_params()
            optimizer.optimizer.state.clear()


class _Files(CheckpointEngine):
    """PyTorch's files, with their CRC-32.

    A failure is stored, not raised: DeepSpeed has a barrier after writing.
    """

    def __init__(self) -> None:
        super().__init__()
        self.written: dict[str, dict[str, int]] = {}
        self.failure: OSError | None = None

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        try:
            os.makedirs(path, exist_ok=True)
        except OSError as error:
            self.failure = error

    def save(self, state_dict: Any, path: str) -> None:
        if self.failure is None:
            try:
                self.written[Path(path).name] = write_file(state_dict, Path(path))
            except OSError as error:
                self.failure = error

    def load(self, path: str, map_location: Any = None) -> Any:
        try:
            return torch.load(path, map_location=map_location, weights_only=True)
        except UnpicklingError as error:
            raise UserError(
                f"{path} must have tensors and plain values, got {why_unread(error)}."
            ) from error

    def create(self, info: Any) -> None:
        pass

    def commit(self, info: Any) -> bool:
        return True
