"""The gateway keeps the memory that its plans take, so that the next plan finds it."""

from __future__ import annotations

import ctypes

__all__ = ["keep_freed_memory"]

# From glibc's malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_LARGEST_BLOCK = 1 << 30
_NEVER = (1 << 31) - 1


def keep_freed_memory() -> bool:
    """Tells the C library to give no freed memory back to the system; False where it is not glibc, and nothing is done.

    A plan for a model of a trillion parameters is made of columns of tens of MB. Given back after each plan, they are
    cleared by the system, page by page, for the next: up to a fifth of the time of planning, and more the larger the
    plan. The process stays as large as its largest plan made it. One arena for all threads, because plans are made in
    threads and those of glibc's own arenas give back what they free whatever the thresholds say.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False
    settings = ((_M_MMAP_THRESHOLD, _LARGEST_BLOCK), (_M_TRIM_THRESHOLD, _NEVER), (_M_ARENA_MAX, 1))
    return all([mallopt(option, value) == 1 for option, value in settings])
