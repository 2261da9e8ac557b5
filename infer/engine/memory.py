"""Weights that do not fit, and running out of memory: one sentence for users."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig

from conf.console import place
from conf.errors import MEMORY, UserError, in_one_line
from conf.memory import check_fits, machine_memory


def check_weights(
    config: PretrainedConfig, name: str, *, dtype: str, device: str | None, ranks: int
) -> None:
    """Raise UserError if a model's weights alone are more than the free memory.

    On Linux a process that takes more than there is would be killed without a word.
    `device` is None for the first GPU, or the CPU of a machine without one; with several
    `ranks` each holds its share. Quantized weights are not checked.
    """
    if getattr(config, "quantization_config", None):
        return
    with torch.device("meta"):
        lm = AutoModelForCausalLM.from_config(config)
    size = getattr(torch, dtype).itemsize
    needed = lm.num_parameters() * size
    purpose = f"the weights of {name} in {dtype}"
    cure = "use a smaller model" if size < 4 else "set dtype=bfloat16"
    gpu = torch.cuda.is_available() and device != "cpu"
    if gpu:
        index = device if ranks == 1 else place()[2]
        free = torch.cuda.mem_get_info(index)
        check_fits(purpose, needed / ranks, free, "GPU", cure)
    if not gpu or ranks == 1:  # also on the way to one GPU
        local = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if ranks > 1 else 1
        free = machine_memory(swap=True)
        check_fits(purpose, needed * local / ranks, free, "machine", cure)


@contextmanager
def enough_memory(remedy: str) -> Iterator[None]:
    """Raise UserError with `remedy` if the block runs out of a device's memory."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        message = f"out of memory: {in_one_line(error)}. {remedy}"
        raise UserError(message, page=MEMORY) from error


def is_out_of_memory(error: Exception) -> bool:
    """Return True if a device's memory did not suffice."""
    # On a CPU PyTorch raises a RuntimeError without a class of its own.
    return isinstance(
        error, torch.OutOfMemoryError | MemoryError
    ) or "can't allocate memory" in str(error)
