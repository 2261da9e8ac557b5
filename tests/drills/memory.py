"""Whether a process grows: samples of what it holds, and their slope over the requests that it has served.

The bound is 2 KiB a request, about what the ids of 200 tokens take, and 0.1 objects. The slope is Theil and
Sen's, the median of all pairs', with its interval of 95 %: memory grows where the interval lies above zero and
reaches beyond the bound. Open files and threads must not change.

A sample is anonymous memory after a garbage collection and after glibc has returned what is free: pages of
files are left out, since other processes share them. `separate_large` gives every tensor its own pages, since
the small pieces between tensors in the heap would hold pages that are nearly empty.
"""

import ctypes
import gc
from dataclasses import dataclass
from typing import Any

import psutil
from scipy.stats import theilslopes

C = ctypes.CDLL(None)
MMAP_THRESHOLD = -3, 64 * 1024  # M_MMAP_THRESHOLD of malloc.h, in bytes
BOUNDS = {"kib": 2.0, "objects": 0.1}  # a request
LEAST = 10  # samples
WARM = 0.25  # of the time: until caches, pools and policies are full


@dataclass(frozen=True)
class Sample:
    """`kib` of anonymous memory, and Python's objects, after `requests`."""

    seconds: float
    requests: int
    kib: float
    objects: int
    files: int
    threads: int


def separate_large() -> None:
    """Let glibc take large pieces of memory outside of the heap, from now on."""
    if hasattr(C, "mallopt"):
        C.mallopt(*MMAP_THRESHOLD)


def sample(seconds: float, requests: int) -> Sample:
    gc.collect()
    if hasattr(C, "malloc_trim"):
        C.malloc_trim(0)
    process = psutil.Process()
    memory, objects = process.memory_info(), len(gc.get_objects())
    kib = (memory.rss - memory.shared) / 1024
    return Sample(
        seconds, requests, kib, objects, process.num_fds(), process.num_threads()
    )


def verdict(samples: list[Sample]) -> dict[str, Any]:
    """Return the slopes after the warm-up, each with its interval, and what `grows`: of fewer than ten samples
    nothing.
    """
    warm = [item for item in samples if item.seconds >= WARM * samples[-1].seconds]
    if len(warm) < LEAST:
        return {"samples": len(warm), "slopes": {}, "grows": []}
    slopes, requests = {}, [item.requests for item in warm]
    for name in BOUNDS:
        slope = theilslopes([getattr(item, name) for item in warm], requests, 0.95)
        slopes[name] = (
            float(slope.slope),
            float(slope.low_slope),
            float(slope.high_slope),
        )
    grows = [
        name
        for name, bound in BOUNDS.items()
        if slopes[name][1] > 0 and slopes[name][2] > bound
    ]
    grows += [
        name
        for name in ("files", "threads")
        if len({getattr(item, name) for item in warm}) > 1
    ]
    return {
        "samples": len(warm),
        "kib": [warm[0].kib, warm[-1].kib],
        "slopes": slopes,
        "grows": grows,
    }
