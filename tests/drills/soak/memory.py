"""Whether a process grows: what it holds, sampled, and the slope of that over the requests it has served.

The bound is 2 KiB for each request: about the least that a text leaves behind where anything of it is kept (the
ids of 200 tokens alone are that much), and 170 MB in a day of one request a second. A table that gets a row
with each request is smaller than that and shows in the number of Python's objects: one for each ten requests
is too many. (What was learned for a temperature is some twenty objects, and the last 64 are kept: stores that
take hours to fill, at 0.2 objects and 2 KiB a request. So house.py fills them beforehand.)

Both are judged by Theil and Sen's slope, the median of all pairs', with its interval of 95 %: it grows where
the interval lies above zero and reaches beyond the bound. Open files and threads may not change at all.

What is sampled is what is held: anonymous memory, after a collection and after glibc has given back what is
free between the tensors, which would come and go by tens of MiB with the order of large requests. For the same
reason `large_apart` gives every tensor of any size pages of its own: in the heap the small pieces between them
hold pages that are nearly empty. Pages of files are left out: whose they are hangs on the other processes that
have the same libraries open. `rss` has all of it.
"""

import ctypes
import gc
import sys
from dataclasses import asdict, dataclass
from typing import Any

import psutil
from scipy.stats import theilslopes

C = ctypes.CDLL(None)
MMAP_THRESHOLD = -3, 64 * 1024  # M_MMAP_THRESHOLD of malloc.h, in bytes
KIB_A_REQUEST = 2.0
OBJECTS_A_REQUEST = 0.1
LEAST = 10  # samples
WARM = 0.25  # of the time: until caches, pools and policies have what they will have


@dataclass(frozen=True)
class Sample:
    """`kib` is anonymous memory; `rss`, in KiB too, all that is mapped in, before anything was given back.
    `blocks` are Python's own pieces of memory, numbers and texts too: growth without them is a library's.
    """

    seconds: float
    requests: int
    kib: float
    rss: float
    objects: int
    blocks: int
    files: int
    threads: int


def large_apart() -> None:
    """Has glibc take large pieces of memory out of the heap, from now on."""
    if hasattr(C, "mallopt"):
        C.mallopt(*MMAP_THRESHOLD)


def sample(seconds: float, requests: int) -> Sample:
    """Now: what is left is held by somebody."""
    process = psutil.Process()
    rss = process.memory_info().rss / 1024
    gc.collect()
    if hasattr(C, "malloc_trim"):
        C.malloc_trim(0)
    memory = process.memory_info()
    held = (memory.rss - memory.shared) / 1024
    return Sample(
        seconds,
        requests,
        held,
        rss,
        len(gc.get_objects()),
        sys.getallocatedblocks(),
        process.num_fds(),
        process.num_threads(),
    )


def slope(samples: list[Sample], what: str) -> tuple[float, float, float]:
    """By request, with its interval."""
    found = theilslopes([getattr(one, what) for one in samples], [one.requests for one in samples], 0.95)
    return float(found.slope), float(found.low_slope), float(found.high_slope)


def verdict(samples: list[Sample]) -> dict[str, Any]:
    """The figures behind the warm-up, and what `grows`; of fewer than ten samples nothing is said."""
    warm = [one for one in samples if one.seconds >= WARM * samples[-1].seconds]
    if len(warm) < LEAST:
        return {"samples": len(warm), "grows": []}
    bounds = {"kib": KIB_A_REQUEST, "objects": OBJECTS_A_REQUEST}
    slopes = {what: slope(warm, what) for what in (*bounds, "blocks", "rss")}
    grows = [what for what, bound in bounds.items() if slopes[what][1] > 0 and slopes[what][2] > bound]
    grows += [what for what in ("files", "threads") if len({getattr(one, what) for one in warm}) > 1]
    most = max(one.kib for one in warm)
    ends = {"first": asdict(warm[0]), "last": asdict(warm[-1])}
    return {"samples": len(warm), **ends, "most_kib": most, "slopes": slopes, "grows": grows}
