"""Settings of the interpreter and the C library for a process that only serves requests."""

from __future__ import annotations

import ctypes
import gc
import sys
from enum import EnumType
from typing import Final

_COLLECT_AFTER_OBJECTS: Final = 20_000
# Time after which the event loop gets the interpreter lock from another thread, such as one that renders metrics for 20
# ms. Python's default is 5 ms, at each turn of the loop.
_SWITCH_SECONDS: Final = 0.001

# Parameters of glibc's mallopt(3), from malloc.h.
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3
_MIB: Final = 1024 * 1024


def tune_process() -> None:
    """Tune the process. Must be called once, when all long-lived objects exist."""
    _reduce_garbage_collection()
    sys.setswitchinterval(min(sys.getswitchinterval(), _SWITCH_SECONDS))  # tracing sets a shorter time
    _keep_pages()
    _speed_up_enum_access()


def _reduce_garbage_collection() -> None:
    """Make the garbage collector run rarely, and skip long-lived objects.

    Requests leave no cycles. But a few requests at once have enough objects to start a full collection each time.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_COLLECT_AFTER_OBJECTS, 10, 10)


def _keep_pages() -> None:
    """Keep freed pages for the next body, instead of getting and clearing new ones for each.

    A body that is longer than the threshold has separate pages, which the system gets back.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # not glibc
        return
    mallopt(_M_MMAP_THRESHOLD, 32 * _MIB)
    mallopt(_M_TRIM_THRESHOLD, 64 * _MIB)
    mallopt(_M_TOP_PAD, _MIB)


def _speed_up_enum_access() -> None:
    """Make access to members of enums as fast as in Python 3.12.

    Before 3.12, the type of enums has a fallback for attribute access that never finds anything else. It makes each
    `Stage.PREFILL` ten times as slow, which is 3 % of a request.
    """
    if sys.version_info < (3, 12) and "__getattr__" in vars(EnumType):
        delattr(EnumType, "__getattr__")
