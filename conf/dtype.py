"""The type of weights that suits a device: `dtype=auto` chooses by its instructions, so one machine always
gets the same type.

A CPU without instructions for bfloat16 converts each weight first: several rows then take up to 70 times as
long as in float32.
"""

import os

from conf.console import print_once

AUTO = "auto"
# Variables that limit the instructions of oneDNN, the library of PyTorch's products on a CPU, in its order of
# precedence; and the values, in any case, that leave those for bfloat16 out.
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

    `device` is None for the first GPU, or the CPU of a machine without one. On a CPU the first rank prints what
    auto chose, and warns of a given bfloat16 that the CPU has no instructions for.
    """
    import torch  # late: settings are read without it

    if requested not in (AUTO, "bfloat16"):
        return requested
    on_cpu = not torch.cuda.is_available() if device is None else device == "cpu"
    if not on_cpu:
        native = requested != AUTO or torch.cuda.is_bf16_supported(
            including_emulation=False
        )
        return "bfloat16" if native else "float32"
    native = cpu_has_bfloat16()
    if requested == AUTO:
        reason = "has" if native else "has no"
        requested = "bfloat16" if native else "float32"
        print_once(
            f"dtype=auto: {requested} (PyTorch {reason} instructions for bfloat16 on this CPU)",
            error=True,
        )
    elif not native:
        print_once(
            "warning: dtype=bfloat16 is emulated, several times more slowly than float32: PyTorch has no "
            "instructions for it on this CPU. Use dtype=auto",
            error=True,
        )
    return requested


def cpu_has_bfloat16() -> bool:
    """Return whether PyTorch multiplies bfloat16 matrices by instructions of this CPU for it.

    On x86 these are AVX512-BF16, which every CPU with AMX has too. oneDNN must be allowed to use them.
    """
    import torch

    # On x86 this is true of every CPU with AVX512, also where oneDNN emulates the type.
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
