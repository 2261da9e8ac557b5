"""The C library's allocator, where weights come and go."""

import ctypes
import platform

M_MMAP_THRESHOLD = -3  # of malloc.h
LARGE = 2**20  # bytes


def return_large_blocks() -> None:
    """Give large blocks back to the system as soon as they are freed, where the C library is glibc.

    It would keep those of up to 32 MB for the next ones; weights of many sizes leave holes there, until the
    heap is as large as the model.
    """
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, LARGE)
