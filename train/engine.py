"""DeepSpeed: start, steps, checkpoints, weights partitioned over ranks.

Importing it sets what DeepSpeed and PyTorch read when they are imported and when they load files.
"""

import contextlib
import os
import random
import resource
import socket
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers.integrations import HfDeepSpeedConfig

from conf import UserError
from train.checkpoint import why_unread, write_file
from train.config import OptimizerConfig, TrainConfig
from train.distributed import Abandoned, world_size

if not torch.cuda.is_available():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # read when deepspeed is imported

# DeepSpeed's own calls of deprecated torch names: nothing that a user can fix.
warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
os.environ.setdefault("DEEPSPEED_LOG_LEVEL", "warning")

# `torch.load` then runs no pickle, here and in child processes: it overrules DeepSpeed's `weights_only=False`.
os.environ["TORCH_FORCE_WEIGHTS_ONLY_LOAD"] = "1"
os.environ.pop("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", None)

import deepspeed
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointEngine
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.fp16.loss_scaler import LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address

# All classes in our checkpoints beside tensors and plain values.
torch.serialization.add_safe_globals([ZeroStageEnum, LossScaler, fragment_address])


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
    # Needed by DeepSpeed's inference alone, and compiled here otherwise: a minute, and a C++ compiler.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(
        dist_backend="nccl" if torch.cuda.is_available() else "gloo", verbose=False
    )
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    return torch.distributed.get_rank(), world_size()


def check_settings(settings: Mapping[str, Any]) -> None:
    """Raise UserError for the first of the user's settings that DeepSpeed refuses."""
    least = {"train_batch_size": 1}
    defaults = DeepSpeedConfig(dict(least))
    for name, value in settings.items():
        default = getattr(defaults, name, None)  # DeepSpeed checks no plain value
        kind, words = (
            (bool, "true or false")
            if isinstance(default, bool)
            else ((int, float), "a number")
        )
        if isinstance(default, int | float) and not isinstance(value, kind):
            raise UserError(f"deepspeed.{name} must be {words}, got {value}.")
        try:
            DeepSpeedConfig({**least, name: value})
        except (
            Exception
        ) as error:  # pydantic's, DeepSpeed's, or Python's for a value of another type
            lines = str(error).splitlines()
            # pydantic: the number of errors, then each setting and what is wrong with it
            reason = " ".join(line.strip() for line in lines[1:3] or lines)
            raise UserError(
                f"deepspeed.{name} must be what DeepSpeed takes, got {value}: {reason}"
            ) from error


def deepspeed_config(config: TrainConfig, *, ranks: int) -> dict[str, Any]:
    """Return the user's DeepSpeed settings with batch sizes and clipping filled in.

    Raises UserError for settings that this trainer does not support.
    """
    if config.deepspeed.get("checkpoint", {}).get("writer"):
        # 0.19.8: the decoupled one cannot hand over what ZeRO 1 and 2 save, the fast one needs libaio.
        raise UserError(
            "deepspeed.checkpoint.writer must be left out, since checkpoints are written with checksums of "
            "their own"
        )
    offload = [
        config.zero.get(f"offload_{part}") or {} for part in ("optimizer", "param")
    ]
    if any(part.get("device") == "nvme" for part in offload):
        raise UserError("deepspeed.zero_optimization must offload to cpu, got nvme")
    return {
        **config.deepspeed,
        "bf16": {**config.deepspeed.get("bf16", {}), "enabled": config.bf16},
        "train_batch_size": config.global_batch,
        "train_micro_batch_size_per_gpu": config.micro_batch,
        "gradient_accumulation_steps": config.accumulations(ranks),
        "gradient_clipping": config.optimizer.clip,
        "zero_allow_untested_optimizer": True,
    }


def parameter_groups(
    module: nn.Module, config: OptimizerConfig
) -> list[dict[str, Any]]:
    """Return the trained parameters: weight decay for matrices; none for norms, biases and embeddings."""
    embeddings = {id(m.weight) for m in module.modules() if isinstance(m, nn.Embedding)}
    # peft's name for single rows of an embedding
    embeddings |= {
        id(p) for name, p in module.named_parameters() if "trainable_tokens" in name
    }
    trained = [p for p in module.parameters() if p.requires_grad]
    # ZeRO 3 flattens a weight and stores its shape elsewhere.
    matrices = {
        id(p) for p in trained if len(getattr(p, "ds_shape", p.shape)) >= 2
    } - embeddings
    decayed = [p for p in trained if id(p) in matrices]
    plain = [p for p in trained if id(p) not in matrices]
    groups = [(decayed, config.weight_decay), (plain, 0.0)]
    return [
        {"params": params, "weight_decay": decay} for params, decay in groups if params
    ]


@contextlib.contextmanager
def load_partitioned(config: TrainConfig) -> Iterator[None]:
    """Partition every weight as it loads, within the block, under ZeRO 3: no rank holds the whole model."""
    alive = None
    if config.stage == 3 and not config.model.random_init:
        # Transformers looks for a living object of this kind.
        alive = HfDeepSpeedConfig(deepspeed_config(config, ranks=world_size()))
    yield
    del alive


def gathered(*modules: nn.Module) -> contextlib.AbstractContextManager[None]:
    """Join these modules' own weights, within the block, where ZeRO 3 has partitioned them.

    What rank 0 writes to them stays.
    """
    parameters = [p for module in modules for p in module.parameters(recurse=False)]
    return deepspeed.zero.GatheredParameters(parameters, modifier_rank=0)


def count_parameters(module: nn.Module) -> int:
    """Count the parameters of the whole module, also where ZeRO 3 has partitioned it."""
    return sum(
        getattr(parameter, "ds_numel", parameter.numel())
        for parameter in module.parameters()
    )


def reseed(*key: int) -> None:
    """Seed PyTorch on every device, NumPy and Python from the numbers of `key`, each from 0.

    Random states are a function of the step, so that no checkpoint has to contain them.
    """
    seed = int(np.random.SeedSequence(key).generate_state(1, np.uint64)[0])
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


class Engine:
    """One rank's share of the training engine.

    With `universal`, `load` reads what `train.checkpoints.to_universal` wrote, on any number of ranks.
    """

    def __init__(
        self, module: nn.Module, config: TrainConfig, *, universal: bool = False
    ) -> None:
        groups = parameter_groups(module, config.optimizer)
        names = {id(parameter): name for name, parameter in module.named_parameters()}
        self._trained = [
            [names[id(parameter)] for parameter in group["params"]] for group in groups
        ]
        optimizer = torch.optim.AdamW(
            groups,
            lr=config.optimizer.lr,
            betas=(config.optimizer.beta1, config.optimizer.beta2),
            fused=True,
        )
        settings = deepspeed_config(config, ranks=world_size())
        if universal:
            settings["checkpoint"] = {
                **settings.get("checkpoint", {}),
                "load_universal": True,
            }
        exact = {name: buffer.clone() for name, buffer in module.named_buffers()}
        self._engine, *_ = deepspeed.initialize(
            model=module, optimizer=optimizer, config=settings
        )
        # DeepSpeed rounds buffers to bfloat16 too: of rotary frequencies that is 3 rad at position 16,000.
        for name, buffer in module.named_buffers():
            buffer.data = exact[name].to(buffer.device)
        self._forget_first_step()
        self._files = _Files()
        self._engine.checkpoint_engine = self._files
        # A copy of a script that nobody needs, written by rank 0 alone: on a full disk the others would wait.
        self._engine._copy_recovery_script = lambda folder: None
        self._gradient_norm = 0.0

    @property
    def device(self) -> torch.device:
        """The device of the batches."""
        return self._engine.device

    @property
    def stage(self) -> int:
        """The stage of ZeRO."""
        return int(self._engine.zero_optimization_stage())

    def forward(self, batch: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
        """Return the module's loss, tally and likeliest tokens of one micro-batch."""
        return self._engine(**batch)

    def step(
        self,
        batches: list[dict[str, Any]],
        lr: float,
        *,
        key: Sequence[int],
        stop: Callable[[], bool] = lambda: False,
    ) -> tuple[Tensor, Tensor]:
        """Take one optimizer step over this rank's m micro-batches; return their losses (m,) and summed tally.

        Raises Abandoned if `stop`, which is called between micro-batches and must return the same on every
        rank, returns True. `key` and the number of a micro-batch within the global batch seed its random state,
        so the number of ranks changes nothing.
        """
        for group in self._engine.optimizer.param_groups:
            group["lr"] = lr
        losses = []
        tallies = []
        for index, batch in enumerate(batches):
            if index and stop():
                raise Abandoned
            reseed(*key, index * world_size() + torch.distributed.get_rank())
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
        """Return the norm before clipping, of the last step; infinite when the engine skipped it."""
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
        """Return the most bytes in use so far, of the GPU, or on a CPU of the process."""
        if torch.cuda.is_available():
            return torch.cuda.max_memory_allocated()
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    def weight_norm(self) -> float:
        """Return the norm of all weights. Called by every rank."""
        squares = 0.0
        for parameter in self._engine.module.parameters():
            with deepspeed.zero.GatheredParameters(
                [parameter], enabled=hasattr(parameter, "ds_id")
            ):
                squares += float(parameter.detach().double().square().sum())
        return squares**0.5

    def save(
        self, folder: Path, tag: str
    ) -> tuple[dict[str, dict[str, int]], OSError | None]:
        """Write weights and optimizer into `folder`/`tag`. Called by every rank.

        Returns size and CRC-32 of the files that this rank wrote, by name, and the error that a write met.
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
        """Continue from the weights and the optimizer in `folder`/`tag`. Called by every rank."""
        optimizer = self._engine.basic_optimizer
        settings = [
            {k: v for k, v in group.items() if k != "params"}
            for group in optimizer.param_groups
        ]
        path, _ = self._engine.load_checkpoint(str(folder), tag=tag)
        if path is None:
            raise FileNotFoundError(f"{folder / tag}: no checkpoint of this engine")
        # From a universal checkpoint ZeRO 3 gives every group the settings of the first, weight decay too, and
        # all parameters one shared count of steps, which each of them then increments.
        for group, setting in zip(optimizer.param_groups, settings, strict=True):
            group.update(setting)
        for parameter, state in optimizer.state.items():
            if isinstance(state.get("step"), Tensor):
                # On the parameter's device: the converter writes CPU tensors.
                state["step"] = state["step"].to(parameter.device, copy=True)

    @property
    def _is_plain(self) -> bool:
        """Whether the optimizer is PyTorch's own, which has no norm: without ZeRO and in float32."""
        return isinstance(self._engine.optimizer, torch.optim.Optimizer)

    def _forget_first_step(self) -> None:
        """Undo the step on zero gradients by which stage 0 in bfloat16 creates its optimizer's state.

        It decays the weights, and Adam would count the true first step as the second.
        """
        optimizer = self._engine.optimizer
        if type(optimizer).__name__ == "FP16_UnfusedOptimizer":
            optimizer.refresh_fp32_params()
            optimizer.optimizer.state.clear()


class _Files(CheckpointEngine):
    """PyTorch's files, with the CRC-32 of what was written.

    A failure is stored, not raised: the ranks meet after writing, and all of them must come.
    """

    written: dict[str, dict[str, int]]
    failure: OSError | None

    def __init__(self) -> None:
        super().__init__()
        self.written = {}
        self.failure = None

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
            raise UserError(
                f"{path} must have tensors and plain values, got {why_unread(error)}"
            ) from error

    def create(self, info: Any) -> None:
        pass

    def commit(self, info: Any) -> bool:
        return True
