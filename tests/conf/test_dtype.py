"""dtype=auto: bfloat16 if the CPU has instructions for it that oneDNN may use."""

import pytest
import torch

from conf.devices import dtype, int8
from conf.devices.dtype import choose_dtype, cpu_has_bfloat16, warn_of_emulation
from conf.errors import UserError


@pytest.mark.parametrize(
    ("native", "requested", "chosen", "line"),
    [
        (True, "auto", "bfloat16", "dtype=auto: bfloat16 (PyTorch has instructions"),
        (False, "auto", "float32", "dtype=auto: float32 (PyTorch has no instructions"),
        (False, "bfloat16", "bfloat16", ""),
        (True, "bfloat16", "bfloat16", ""),
        (False, "float16", "float16", ""),
    ],
)
def test_auto_takes_the_faster_type_and_says_which(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    native: bool,
    requested: str,
    chosen: str,
    line: str,
) -> None:
    """The demo trained 70 times more slowly on a CPU without bfloat16 instructions."""
    monkeypatch.setattr(dtype, "cpu_has_bfloat16", lambda: native)
    assert choose_dtype(requested, "cpu") == chosen
    printed = capsys.readouterr().err
    assert printed.startswith(line) and printed.count("\n") == bool(line)


@pytest.mark.parametrize(
    ("requested", "device", "warns"),
    [("bfloat16", "cpu", True), ("float32", "cpu", False), ("bfloat16", "cuda", False)],
)
def test_emulated_products_of_pytorch_are_warned_of(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    requested: str,
    device: str,
    warns: bool,
) -> None:
    monkeypatch.setattr(dtype, "cpu_has_bfloat16", lambda: False)
    warn_of_emulation(requested, device)
    printed = capsys.readouterr().err
    assert printed.startswith("warning: dtype=bfloat16 is emulated") is warns


X86 = {"avx512_bf16": True, "amx_bf16": True}


@pytest.mark.parametrize(
    ("capabilities", "supported", "environment", "native"),
    [
        (X86, True, {}, True),
        # AVX512 alone: PyTorch calls the type supported, and oneDNN emulates it.
        ({"avx512_bf16": False, "amx_bf16": False}, True, {}, False),
        (X86, False, {"ONEDNN_MAX_CPU_ISA": "AVX2"}, False),
        (X86, True, {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE"}, False),
        (X86, True, {"DNNL_MAX_CPU_ISA": "avx512_core_vnni"}, False),
        (X86, True, {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"}, True),
        (X86, True, {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_AMX"}, True),
        (
            X86,
            True,
            {"ONEDNN_MAX_CPU_ISA": "ALL", "DNNL_MAX_CPU_ISA": "AVX512_CORE"},
            True,
        ),
        ({"neon": True, "bf16": True}, True, {}, True),  # Arm
        ({"neon": True, "bf16": False}, False, {}, False),
    ],
)
def test_the_instructions_decide(
    monkeypatch: pytest.MonkeyPatch,
    capabilities: dict[str, bool],
    supported: bool,
    environment: dict[str, str],
    native: bool,
) -> None:
    """auto timed three products of a millisecond, and 16 of 150 starts on a CPU with AMX chose
    float32, so a repeated `infer.regenerate` wrote different texts.
    """
    for name in dtype.ISA_LIMITS:
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
    monkeypatch.setattr(
        torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: supported
    )
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
    assert cpu_has_bfloat16() is native


def test_this_machine_always_gets_the_same_type() -> None:
    assert len({choose_dtype("auto", "cpu") for _ in range(20)}) == 1


@pytest.mark.parametrize("exact", [True, False])
def test_without_exact_products_int8_becomes_float32_with_a_warning(
    exact: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(int8, "is_exact", lambda kernel, rows: exact)
    monkeypatch.setattr(int8, "exact_kernel", int8.exact_kernel.__wrapped__)
    assert choose_dtype("int8", "cpu") == ("int8" if exact else "float32")
    printed = capsys.readouterr().err
    assert printed.startswith("warning: dtype=int8 needs exact") == (not exact)


def test_a_gpu_has_no_int8() -> None:
    with pytest.raises(UserError, match="on a GPU, got int8. Choose one of"):
        choose_dtype("int8", "cuda:0")


def test_auto_never_takes_int8() -> None:
    assert choose_dtype("auto", "cpu") != "int8"
