"""Compile and load native.c and its headers, the C functions of int8 on a CPU (int8.py, infer/engine).

The machine's C compiler builds the library once per process, in two to four seconds. Without a
compiler PyTorch's operations are used.
"""

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
    c_uint64,
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
TYPES = {"p": c_void_p, "l": c_long, "i": c_int, "f": c_float, "u": c_uint64}
#: The types of arguments.
SIGNATURES = {
    "adds_in_sixteen_bits": "",
    "apply": "pllppi",
    "round_groups": "llpfllppp i",
    "decode": "pppp",
    "top": "lllplllppppp",
    "contenders": "lpffup",
    "read_hidden": "plpp",
    "correct": "pppplpp",
}


class CMatrix(Structure):
    """`matrix` of products.h."""

    _fields_ = [
        *((name, c_long) for name in ("d", "outputs")),
        *((name, c_void_p) for name in ("weight", "scale", "offsets")),
    ]


@cache
def library() -> CDLL | None:
    """Compile and load native.c; return None, after a warning, if this machine cannot."""
    compiler = shlex.split(os.environ.get("CC") or "cc")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "native.so")
        native = build(path, [*compiler, "-fopenmp"]) or build(path, compiler)
        if native is None:
            getLogger(__name__).warning(
                "dtype=int8 is about half as fast without a C compiler: %s could not compile native.c. "
                "Install gcc, or set CC to a compiler.",
                compiler[0],
            )
            return None
    for name, types in SIGNATURES.items():
        function = getattr(native, name)
        function.argtypes = [TYPES[letter] for letter in types.replace(" ", "")]
        function.restype = None
    native.adds_in_sixteen_bits.restype = c_int
    native.contenders.restype = c_long
    return native


def build(path: Path, compiler: Sequence[str]) -> CDLL | None:
    """Compile native.c to `path` and load it; None if that fails."""
    command = [*compiler, *FLAGS, "-o", str(path), str(SOURCE), "-lm"]
    try:
        subprocess.run(command, check=True, capture_output=True)
        return CDLL(str(path))
    except (OSError, subprocess.CalledProcessError):
        return None
