"""Print the operations, hours and memory of a run that plan=true asks for."""

import math

from rich.table import Table

from conf.console import PlainConsole
from conf.devices.memory import GIB
from conf.errors import UserError, counted
from train.config import TrainConfig
from train.flops import peak_flops
from train.inputs import RunInputs
from train.spec import RESERVED, Memory, ModelSpec, estimate_memory

# For each value of plan_device, the name in torch.cuda.get_device_name and the GiB that a
# process can allocate.
DEVICES = {
    "a100_40gb": ("NVIDIA A100-SXM4-40GB", 39.4),
    "a100_80gb": ("NVIDIA A100-SXM4-80GB", 79.2),
    "h100_80gb": ("NVIDIA H100 80GB HBM3", 79.1),
    "h200_141gb": ("NVIDIA H200", 139.8),
    "l40s_48gb": ("NVIDIA L40S", 44.4),
    "rtx4090_24gb": ("NVIDIA GeForce RTX 4090", 23.6),
}
RANKS_PER_MACHINE = 8  # most ranks of one machine that a plan assumes
UTILISATION = 0.4  # share of a device's peak that a plan assumes


def print_plan(config: TrainConfig, inputs: RunInputs | None, spec: ModelSpec) -> None:
    """Print the plan as a table. Raises UserError for settings that cannot run."""
    if config.minutes is not None:
        raise UserError(
            f"plan=true needs a number of steps, got minutes={config.minutes:g}. "
            "Set minutes=null steps=N."
        )
    table = Table(title="training plan", show_header=False)
    for name, value in plan(config, inputs, spec).items():
        table.add_row(name, value)
    PlainConsole().print(table)


def plan(
    config: TrainConfig, inputs: RunInputs | None, spec: ModelSpec
) -> dict[str, str]:
    """Return the lines of the plan by name. `inputs` is None without data.path.

    Raises UserError for settings that cannot run.
    """
    kind = spec.architecture.model_type
    total = config.steps * config.global_batch * spec.seq_len
    computed = total * spec.work.rows / spec.seq_len
    lines = {
        "model": f"{kind}, {spec.parameters / 1e9:.2f}B parameters",
        "batch": f"{counted(config.global_batch, 'sequence')} of {spec.seq_len:,} = "
        f"{counted(config.plan_ranks, 'rank')} x {config.micro_batch} x "
        f"{counted(config.accumulations(config.plan_ranks), 'accumulation')}",
        "tokens": f"{_count(total)} of data, {_count(computed)} computed",
    }
    if inputs:
        train = inputs.data["train"]
        human = config.global_batch - config.data.own_sequences(config.global_batch)
        epochs = config.steps * human / train["sequences"]
        tokens = _count(train["tokens"])
        lines["data"] = f"{config.data.path}: {tokens} tokens, read {epochs:.2f} times"
    memory = estimate_memory(spec, config, ranks=config.plan_ranks)
    device, capacity = plan_device(config.plan_device)
    return {
        **lines,
        **_cost(config, config.steps * spec.flops, peak_flops(device)),
        **_memory(config, memory, capacity),
    }


def _cost(config: TrainConfig, flops: float, peak: float | None) -> dict[str, str]:
    """Return the plan's lines about operations and hours."""
    lines = {"operations": f"{flops:.2e}"}
    if peak:
        hours = flops / (UTILISATION * config.plan_ranks * peak) / 3600
        lines["hours"] = (
            f"{hours:.1f} on {config.plan_ranks} x {config.plan_device} "
            f"at {100 * UTILISATION:.0f} % of {peak / 1e12:.0f} TFLOP/s (assumed)"
        )
    return lines


def _memory(config: TrainConfig, memory: Memory, capacity: float) -> dict[str, str]:
    """Return the plan's lines about memory on GPUs of this capacity in bytes."""
    capacity -= RESERVED
    verdict = "fits" if memory.total <= capacity else "does not fit"
    local = min(config.plan_ranks, RANKS_PER_MACHINE)
    machine = (
        f"{local * memory.loading / GIB:.1f} GiB to load the model "
        f"on {counted(local, 'rank')}"
    )
    if memory.host:
        machine += f", {local * memory.host / GIB:.1f} GiB of states offloaded"
    return {
        "memory per GPU": f"{verdict}: {memory.total / GIB:.1f} of "
        f"{capacity / GIB:.1f} GiB of {config.plan_device}",
        **{
            f"  {name}": f"{getattr(memory, name) / GIB:.1f} GiB"
            for name in ("states", "activations", "loss")
        },
        "memory per machine": machine,
    }


def _count(tokens: float) -> str:
    return f"{tokens / 1e9:.2f}B" if tokens >= 1e9 else f"{tokens / 1e6:.2f}M"


def plan_device(device: str) -> tuple[str, float]:
    """Return the name and the bytes of a device: a key of DEVICES, or a number of GiB.

    The name of a number is "". Raises UserError for other text.
    """
    name, given = DEVICES.get(device, ("", device))
    try:
        gib = float(given)
    except ValueError:
        gib = math.nan
    if not 0 < gib < math.inf:
        raise UserError(
            f"plan_device must be {', '.join(DEVICES)} or a number of GiB, got {device}. "
            f"Set plan_device={next(iter(DEVICES))}."
        )
    return name, gib * GIB
