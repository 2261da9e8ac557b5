"""Run DeepSpeed: start the ranks, take steps, write checkpoints, partition weights.

Importing this module sets environment variables that DeepSpeed and PyTorch read.
"""

import contextlib
import gc
import os
import random
import resource
import socket
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers.integrations import HfDeepSpeedConfig

from conf.devices.memory import reuse_freed_memory
from conf.errors import UserError, in_one_line
from train.config import TrainConfig
from train.distributed import COLLECTIVE_TIMEOUT, Abandoned
from train.optimizer import build_optimizer, parameter_groups
from train.tensor_files import load_mapped, refusal, write_file, zero_stage

if not torch.cuda.is_available():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # read when deepspeed is imported

# On a CPU PyTorch and oneDNN cache a kernel for each shape, by default 1,024 with about 0.5 MB
# each. The shapes of a step are shared by its layers, and hardly by other steps.
os.environ.setdefault("LRU_CACHE_CAPACITY", "128")
os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "128")

# DeepSpeed calls deprecated functions of PyTorch.
warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
os.environ.setdefault("DEEPSPEED_LOG_LEVEL", "warning")

# Make `torch.load` refuse pickled code, here and in child processes. This overrides the
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

FROZEN_BYTES = 2**32  # size of a file of frozen weights

# All classes in our checkpoints besides tensors and plain values. `partial` makes a function
# object of its own: the end of a `safe_globals` block in train.tensor_files removes the objects
# of KNOWN from PyTorch's list.
named_stage = partial(zero_stage), "builtins.getattr"
torch.serialization.add_safe_globals(
    [ZeroStageEnum, LossScaler, fragment_address, named_stage]
)


def start() -> tuple[int, int]:
    """Initialize the process group; return the rank and the number of ranks.

    Without torchrun's variables this process is the only rank.
    """
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
    # DeepSpeed would compile this operation here; only its inference needs it.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(
        dist_backend="nccl" if torch.cuda.is_available() else "gloo",
        timeout=COLLECTIVE_TIMEOUT,
        verbose=False,
    )
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    else:
        reuse_freed_memory()
    return dist.get_rank(), dist.get_world_size()


def check_deepspeed_settings(settings: Mapping[str, Any]) -> None:
    """Raise UserError for the first of the user's settings that DeepSpeed refuses."""
    for name, value in settings.items():
        try:
            DeepSpeedConfig({"train_micro_batch_size_per_gpu": 1, name: value})
        except Exception as error:  # pydantic's, DeepSpeed's or Python's
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
        # Use PyTorch's AdamW: DeepSpeed would compile its AdamW for CPUs here.
        "zero_force_ds_cpu_optimizer": False,
    }


def model_states(
    total: int, trained: int, largest: int, config: TrainConfig, *, ranks: int
) -> tuple[int, int]:
    """Return the bytes of a rank's model states on its GPU and on its machine.

    DeepSpeed's estimators count weights, gradients and optimizer of `trained` parameters;
    the weights of the other parameters in `total` are added. `largest` is the number of
    parameters in the largest module. The estimators are for bfloat16 and ZeRO 2 and 3:
    float32 adds 2 bytes for each weight, and below stage 2 every rank has all gradients.
    """
    # One node has all ranks: the estimators use only their number for a GPU, and then the
    # bytes of the host belong to all ranks together.
    offload = config.zero.get("offload_optimizer") is not None
    if config.stage == 3:
        host, device, _ = estimate_zero3_model_states_mem_needs(
            trained,
            largest,
            num_gpus_per_node=ranks,
            cpu_offload=offload,
            cpu_offload_params=config.zero.get("offload_param") is not None,
        )
        held = (total - trained) / ranks
    else:
        host, device = estimate_zero2_model_states_mem_needs(
            trained,
            num_gpus_per_node=ranks if config.stage else 1,
            cpu_offload=offload,
        )
        held = total - trained
        if config.stage == 1:
            device += 2 * trained
    wide = 0 if config.bf16 else 2
    weights = total / ranks if config.stage == 3 else total
    return int(device + 2 * held + wide * weights), host // ranks if offload else 0


@contextlib.contextmanager
def load_partitioned(config: TrainConfig) -> Iterator[None]:
    """Within the block, let Transformers partition each weight as it loads, under ZeRO 3."""
    reference = None
    if config.stage == 3 and not config.model.random_init:
        # Transformers partitions weights while an object of this class exists.
        reference = HfDeepSpeedConfig(
            deepspeed_config(config, ranks=dist.get_world_size())
        )
    yield
    del reference


@contextlib.contextmanager
def gathered(*modules: nn.Module) -> Iterator[None]:
    """Within the block, gather these modules' own weights if ZeRO 3 partitions them.

    Changes that rank 0 makes to them are kept.
    """
    parameters = [p for module in modules for p in module.parameters(recurse=False)]
    with deepspeed.zero.GatheredParameters(parameters, modifier_rank=0):
        yield


def count_parameters(module: nn.Module) -> int:
    """Return the number of parameters of the whole module, also if ZeRO 3 partitions it."""
    return sum(
        getattr(parameter, "ds_numel", parameter.numel())
        for parameter in module.parameters()
    )


def reseed(*key: int) -> None:
    """Seed PyTorch on every device, NumPy and Python from `key`, non-negative integers.

    Random states are a function of the step, so that checkpoints need not contain them.
    """
    seed = int(np.random.SeedSequence(key).generate_state(1, np.uint64)[0])
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


def free_memory() -> None:
    """Free the memory of models that are no longer used, for the next run of this process."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


class Engine:
    """One rank of the training engine.

    With `universal`, `load` reads the files of `train.checkpoint.to_universal`, on any
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
        # A frozen weight and its names; tied weights have several.
        self._frozen: dict[int, tuple[nn.Parameter, list[str]]] = {}
        for name, parameter in module.named_parameters(remove_duplicate=False):
            if not parameter.requires_grad:
                own = self._frozen.setdefault(id(parameter), (parameter, []))
                own[1].append(name)
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
        # DeepSpeed also rounds buffers to bfloat16. With rounded rotary frequencies the
        # angle at position 16,000 would be off by 3 rad.
        for name, buffer in module.named_buffers():
            buffer.data = exact[name].to(buffer.device)
        self._forget_first_step()
        self._files = _Files(name for _, own in self._frozen.values() for name in own)
        self._engine.checkpoint_engine = self._files
        # DeepSpeed copies a script next to the weights; if that fails on a full disk, the
        # other ranks would wait.
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
        """Return the loss, the tally and the likeliest tokens of one micro-batch."""
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

        Returns their losses (m,) and summed tally. `stop` is called between micro-batches
        and must return the same on every rank; if it returns True, Abandoned is raised.
        `key` and the index of a micro-batch within the global batch seed its random
        state, so that the result does not depend on the number of ranks.
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
        """Return the norm of the last step's gradient before clipping."""
        if self._is_plain:
            return self._gradient_norm
        return float(self._engine.get_global_grad_norm() or 0.0)

    def device_name(self) -> str:
        """Return the GPU's name from torch.cuda, or "cpu"."""
        return (
            torch.cuda.get_device_name(self.device)
            if torch.cuda.is_available()
            else "cpu"
        )

    def peak_memory(self) -> int:
        """Return the peak memory so far in bytes: of the GPU, or of the process on a CPU."""
        if torch.cuda.is_available():
            return torch.cuda.max_memory_allocated()
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    def close(self) -> None:
        """Remove DeepSpeed's hooks, which would keep the model and the optimizer in memory."""
        self._engine.destroy()

    @property
    def has_frozen(self) -> bool:
        """Whether some weights are frozen, as with LoRA; `save` leaves them out."""
        return bool(self._frozen)

    def save_frozen(
        self, folder: Path
    ) -> tuple[dict[str, dict[str, int]], OSError | None]:
        """Write the frozen weights by name into `folder`. Every rank must call this.

        Returns size and CRC-32 of rank 0's files by name, and the error of a failed write.
        """
        self._files.written = {}
        self._files.failure = None
        part: dict[str, Tensor] = {}
        size = 0
        last = len(self._frozen)
        for number, (parameter, names) in enumerate(self._frozen.values(), start=1):
            with deepspeed.zero.GatheredParameters(
                [parameter], enabled=hasattr(parameter, "ds_id")
            ):
                if dist.get_rank():
                    continue
                weight = parameter.detach().to("cpu", copy=True)
            part |= dict.fromkeys(names, weight)
            size += weight.nbytes
            if size >= FROZEN_BYTES or number == last:
                name = f"frozen-{len(self._files.written):05}.pt"
                self._files.save(part, str(folder / name))
                part, size = {}, 0
        return self._files.written, self._files.failure

    def load_frozen(self, folder: Path) -> None:
        """Load the frozen weights from `folder`. Every rank must call this."""
        weights: dict[str, Tensor] = {}
        for path in folder.glob("*.pt"):
            weights |= load_mapped(path)
        for parameter, names in self._frozen.values():
            with deepspeed.zero.GatheredParameters(
                [parameter], modifier_rank=0, enabled=hasattr(parameter, "ds_id")
            ):
                parameter.data.copy_(weights[names[0]])

    def save(
        self, folder: Path, tag: str
    ) -> tuple[dict[str, dict[str, int]], OSError | None]:
        """Write weights and optimizer into `folder`/`tag`. Every rank must call this.

        Frozen weights are left out.

        Returns size and CRC-32 of this rank's files by name, and the error of a failed write.
        """
        self._files.written = {}
        self._files.failure = None
        # Stage 0 stores float32 copies of bfloat16 weights in this order of names.
        state = {"trained": self._trained}
        self._engine.save_checkpoint(
            str(folder),
            tag=tag,
            client_state=state,
            save_latest=False,
            exclude_frozen_parameters=self.has_frozen,
        )
        return self._files.written, self._files.failure

    def load(self, folder: Path, tag: str) -> None:
        """Load weights and optimizer from `folder`/`tag`. Every rank must call this."""
        optimizer = self._engine.basic_optimizer
        settings = [
            {k: v for k, v in group.items() if k != "params"}
            for group in optimizer.param_groups
        ]
        path, _ = self._engine.load_checkpoint(
            str(folder), tag=tag, load_module_strict=not self.has_frozen
        )
        if path is None:
            raise FileNotFoundError(f"{folder / tag}: no checkpoint of this engine")
        trained = {name for names in self._trained for name in names}
        if missing := sorted(trained - self._files.read):
            raise UserError(
                f"{folder / tag} must have all trained weights, got no {missing[0]}. "
                "Delete it to continue from the checkpoint before."
            )
        # From a universal checkpoint, ZeRO 3 gives every group the first group's settings.
        # All parameters share one step tensor, which each of them then increments.
        for group, setting in zip(optimizer.param_groups, settings, strict=True):
            group.update(setting)
        for parameter, state in optimizer.state.items():
            if isinstance(state.get("step"), Tensor):
                # Move it to the parameter's device: the converter writes CPU tensors.
                state["step"] = state["step"].to(parameter.device, copy=True)

    @property
    def _is_plain(self) -> bool:
        """Whether the optimizer is PyTorch's own (float32 without ZeRO), which stores no norm."""
        return isinstance(self._engine.optimizer, torch.optim.Optimizer)

    def _forget_first_step(self) -> None:
        """Undo the step on zero gradients that DeepSpeed takes at the start of stage 0 in bfloat16.

        That step decays the weights, and Adam would count the first real step as the second.
        """
        optimizer = self._engine.optimizer
        if type(optimizer).__name__ == "FP16_UnfusedOptimizer":
            optimizer.refresh_fp32_params()
            optimizer.optimizer.state.clear()


class _Files(CheckpointEngine):
    """DeepSpeed's checkpoint I/O by torch.save and torch.load, with checksums.

    A failed write is stored, not raised: the other ranks wait at DeepSpeed's barrier after it.
    `read` has the names of the weights in the last file that was loaded.
    """

    def __init__(self, frozen: Iterable[str]) -> None:
        super().__init__()
        self._frozen = frozenset(frozen)
        self.read: set[str] = set()
        self.written: dict[str, dict[str, int]] = {}
        self.failure: OSError | None = None

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        try:
            os.makedirs(path, exist_ok=True)
        except OSError as error:
            self.failure = error

    def save(self, state_dict: Any, path: str) -> None:
        if "module" in state_dict:
            # DeepSpeed leaves out frozen weights by the first of their names only.
            weights = state_dict["module"].items()
            own = {name: weight for name, weight in weights if name not in self._frozen}
            state_dict = {**state_dict, "module": own}
        if self.failure is None:
            try:
                self.written[Path(path).name] = write_file(state_dict, Path(path))
            except OSError as error:
                self.failure = error

    def load(self, path: str, map_location: Any = None) -> Any:
        try:
            state = torch.load(path, map_location=map_location, weights_only=True)
            if "module" in state:
                self.read = set(state["module"])
            return state
        except UnpicklingError as error:
            raise UserError(
                f"{path} must contain only tensors and plain values, got {refusal(error)}. "
                "Delete its folder to continue from the checkpoint before."
            ) from error

    def create(self, info: Any) -> None:
        pass

    def commit(self, info: Any) -> bool:
        return True
