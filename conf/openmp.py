"""How long OpenMP's threads spin while they wait: PyTorch's operations on a CPU are shared by such threads.

A thread that has finished its part of an operation waits for the next one. libgomp, the OpenMP of PyTorch's
wheels for Linux, has it spin for 300,000 turns, some 10 ms, before it sleeps. On a machine with other work
the spinning threads take the cores from the threads that they wait for: with one busy process beside two
threads on two cores, decoding falls to a tenth. A short spin outlasts the gap between two operations, which
is all that a quiet machine needs (tests/benchmarks/busy.py).
"""

from collections.abc import MutableMapping

SPIN_COUNT = "GOMP_SPINCOUNT"
#: Variables by which users decide it themselves.
OWN_CHOICE = (SPIN_COUNT, "OMP_WAIT_POLICY")
TURNS = 1000


def shorten_spin(environ: MutableMapping[str, str]) -> None:
    """Set libgomp's spin in the environment, unless the user has decided it.

    libgomp reads it once, when PyTorch is imported; child processes inherit it.
    """
    if not any(name in environ for name in OWN_CHOICE):
        environ[SPIN_COUNT] = str(TURNS)
