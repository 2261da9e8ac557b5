"""Choose the dtype of the weights for a device.

`dtype=auto` depends only on the device's instructions, so one machine always gets the same dtype. On a CPU
without bfloat16 instructions PyTorch's products convert each weight first: a forward of several rows then takes
up to 70 times as long as in float32. int8 is for decoding on CPUs with exact integer products, and auto never
chooses it.

For decoding, auto depends on the model too (ModelDirectory.choose_dtype): native.c multiplies in bfloat16 on
every CPU with AVX2.
"""

import os

from conf.console import print_once
from conf.errors import UserError

AUTO = "auto"
INT8 = "int8"
# Environment variables that limit the instructions of oneDNN, PyTorch's library for matrix products on a CPU,
# in order of precedence, and their (case-insensitive) values that exclude bfloat16 instructions.
ISA_LIMITS = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")
WITHOUT_BFLOAT16 = {
    "SSE41",
    "AVX",
    "AVX2",
    "AVX2_VNNI",
    "AVX2_VNNI_2",
    "AVX512_CORE",
    "AVX512_CORE_VNNI",
}


def choose_dtype(requested: str, device: str | None = None) -> str:
    """Return the dtype for `requested`; "auto" is bfloat16 if the device has instructions for it, else float32.

    `device=None` is the first GPU, or the CPU of a machine without a GPU. On a CPU, rank 0 prints the choice of
    auto. If the CPU's int8 products are inexact, it warns and returns float32. Raises UserError for int8 on a
    GPU.
    """
    import torch  # imported here because reading settings must not load it

    if requested not in (AUTO, INT8):
        return requested
    on_cpu = not torch.cuda.is_available() if device is None else device == "cpu"
    if requested == INT8:
        return _choose_int8(on_cpu=on_cpu)
    if not on_cpu:
        native = torch.cuda.is_bf16_supported(including_emulation=False)
        return "bfloat16" if native else "float32"
    native = cpu_has_bfloat16()
    reason = "has" if native else "has no"
    chosen = "bfloat16" if native else "float32"
    print_once(
        f"dtype=auto: {chosen} (PyTorch {reason} instructions for bfloat16 on this CPU)",
        error=True,
    )
    return chosen


def warn_of_emulation(dtype: str, device_type: str) -> None:
    """Print a warning on rank 0 if PyTorch's products in `dtype` are emulated on the device."""
    if dtype == "bfloat16" and device_type == "cpu" and not cpu_has_bfloat16():
        print_once(
            "warning: dtype=bfloat16 is emulated and several times slower than float32: PyTorch has no "
            "bfloat16 instructions for this CPU. Use dtype=float32",
            error=True,
        )


def _choose_int8(*, on_cpu: bool) -> str:
    if not on_cpu:
        raise UserError(
            "dtype must be auto, float32, bfloat16 or float16 on a GPU, got int8. Choose one of these, or set "
            "device=cpu."
        )
    from conf.devices.int8 import exact_kernel

    if exact_kernel():
        return INT8
    print_once(
        "warning: dtype=int8 needs exact integer products by an x86 CPU with AVX2, which this CPU does not "
        "have: using float32",
        error=True,
    )
    return "float32"


def cpu_has_bfloat16() -> bool:
    """Return whether PyTorch multiplies bfloat16 matrices by native instructions of this CPU.

    On x86 these are AVX512-BF16, which every CPU with AMX also has. ISA_LIMITS may forbid oneDNN to use them.
    """
    import torch

    # On x86 this is true for every CPU with AVX512, even if oneDNN emulates bfloat16.
    if not torch.backends.mkldnn.is_available() or not (
        torch.ops.mkldnn._is_mkldnn_bf16_supported()
    ):
        return False
    capabilities = torch.cpu.get_capabilities()
    if "avx512_bf16" not in capabilities:
        return True  # not x86
    limits = filter(None, map(os.environ.get, ISA_LIMITS))
    limited = next(limits, "").upper() in WITHOUT_BFLOAT16
    return bool(capabilities["avx512_bf16"]) and not limited
