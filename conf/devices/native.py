"""Compile and load native.c and its headers: C functions of int8 and bfloat16 on a CPU (infer/engine).

The machine's C compiler builds a library for each of the two types in two to four seconds, once for
each version of the sources and kind of CPU. Without a compiler PyTorch's operations are used.
"""

import hashlib
import os
import shlex
import subprocess
import tempfile
from collections.abc import Sequence
from ctypes import (
    CDLL,
    Structure,
    c_float,
    c_int,
    c_long,
    c_void_p,
)
from functools import cache
from logging import getLogger
from pathlib import Path

SOURCE = Path(__file__).with_suffix(".c")
FLAGS = (
    *("-O3", "-march=native", "-shared", "-fPIC"),
    *("-fno-math-errno", "-fno-trapping-math", "-fno-strict-aliasing"),
)
#: Numbers in a vector of rows.h; the widths of rows between products must be multiples of it.
LANES = 8
TYPES = {"p": c_void_p, "l": c_long, "i": c_int, "f": c_float}
#: The types of arguments, by function.
SIGNATURES = {
    "apply": "pllppi",
    "input_size": "",
    "decode": "pppp",
    "top": "pllppi",
    "pick_noisiest": "plffpp",
    "noisy_top": "plllffipppi",
    "read_hidden": "plpp",
    "correct": "pppplpp",
}
#: The functions that only the library of int8 has.
OF_INT8 = {"adds_in_sixteen_bits": "", "round_groups": "llpfllppp i"}
#: The types of results; other functions return nothing.
RESULTS = {
    "adds_in_sixteen_bits": c_int,
    "input_size": c_int,
}
#: The compiler's flags, by the type of the weights.
DEFINED = {"int8": (), "bfloat16": ("-DBFLOAT16",)}


class CMatrix(Structure):
    """`matrix` of threads.h."""

    _fields_ = [
        *((name, c_long) for name in ("d", "outputs", "bytes")),
        *((name, c_void_p) for name in ("weight", "scale", "offsets")),
    ]


@cache
def library(dtype: str = "int8") -> CDLL | None:
    """Load native.c for weights in int8 or bfloat16, compiled now or before; None if this machine cannot."""
    compiler = _compiler()
    flags = DEFINED[dtype]
    native = built([*compiler, "-fopenmp", *flags]) or built([*compiler, *flags])
    if native is None:
        return None
    own = OF_INT8 if dtype == "int8" else {}
    for name, types in {**SIGNATURES, **own}.items():
        function = getattr(native, name)
        function.argtypes = [TYPES[letter] for letter in types.replace(" ", "")]
        function.restype = RESULTS.get(name)
    return native


def warn_without_library(dtype: str) -> None:
    """Log that decoding in `dtype` has no library."""
    getLogger(__name__).warning(
        "dtype=%s is at most half as fast without a C compiler: %s could not compile native.c. "
        "Install gcc, or set CC to a compiler.",
        *(dtype, _compiler()[0]),
    )


def _compiler() -> list[str]:
    return shlex.split(os.environ.get("CC") or "cc")


def built(compiler: Sequence[str]) -> CDLL | None:
    """Load the library that `compiler` builds from native.c; None if that fails.

    It is kept in Hugging Face's cache of assets, by a hash of the sources, the command and the CPU.
    """
    from huggingface_hub import cached_assets_path

    command = [*compiler, *FLAGS, str(SOURCE), "-lm"]
    try:
        key = library_key(command)
        path = cached_assets_path("adaptive-tokens", "native", key) / "native.so"
        # A file of another system with the same home folder cannot be loaded.
        library = loaded(path) or compiled(command, path)
    except OSError:  # no such folder can be made, or the CPU is not known
        library = None
    if library is None:  # the disk of the folder may be full
        with tempfile.TemporaryDirectory() as folder:
            library = compiled(command, Path(folder, "native.so"))
    return library


def library_key(command: Sequence[str]) -> str:
    """Return a hash of a command, the sources that it compiles, and the CPU.

    Raises OSError where the CPU is not known: a library for another CPU may crash.
    """
    files = sorted(SOURCE.parent.glob("*.[ch]"))
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    cpu = sorted({line for line in lines if line.startswith(("model", "flags"))})
    parts = *command, *cpu, *(file.read_text() for file in files)
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def compiled(command: Sequence[str], path: Path) -> CDLL | None:
    """Compile to `path`, which appears only when it is complete, and load it; None if that fails."""
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        output = Path(folder, path.name)
        try:
            subprocess.run(
                [*command, "-o", str(output)], check=True, capture_output=True
            )
            output.replace(path)
        except (OSError, subprocess.CalledProcessError):
            return None
    return loaded(path)


def loaded(path: Path) -> CDLL | None:
    """Load a library; None if there is no such file, or not for this system."""
    try:
        return CDLL(str(path))
    except OSError:
        return None
