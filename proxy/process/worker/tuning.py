"""What the interpreter and the C library do, set for a process that serves requests and nothing else."""

from __future__ import annotations

import ctypes
import gc
import sys
from enum import EnumType
from typing import Final

_COLLECT_AFTER_OBJECTS: Final = 20_000
# The event loop gets the interpreter back from another thread, such as one that renders metrics for 20 ms, after this
# long and not after 5 ms, each time that it wakes.
_SWITCH_SECONDS: Final = 0.001

# Parameters of glibc's mallopt(3), malloc.h.
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3
_MIB: Final = 1024 * 1024


def tune() -> None:
    """Call it once in each process, when everything is there that lives as long as the process."""
    _spare_the_collector()
    sys.setswitchinterval(min(sys.getswitchinterval(), _SWITCH_SECONDS))  # tracing wants a shorter one
    _keep_pages()
    _find_members_at_once()


def _spare_the_collector() -> None:
    """Let Python look for cycles of garbage seldom, and not among what stays.

    Requests leave no cycles behind, but a few of them at once are enough objects for a look at all of them each time.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_COLLECT_AFTER_OBJECTS, 10, 10)


def _keep_pages() -> None:
    """Let the pages of one long body be used for the next one, instead of getting and clearing new ones for each.

    A body that is longer than the threshold still has pages of its own, which go back when it is freed.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # not glibc
        return
    mallopt(_M_MMAP_THRESHOLD, 4 * _MIB)
    mallopt(_M_TRIM_THRESHOLD, 64 * _MIB)
    mallopt(_M_TOP_PAD, _MIB)


def _find_members_at_once() -> None:
    """Let members of enums be found as Python 3.12 finds them.

    Before, the type of all enums has a fallback. It finds nothing that is not found without it, and as there is one,
    each `Stage.PREFILL` takes ten times as long: 3 % of a request.
    """
    if sys.version_info < (3, 12) and "__getattr__" in vars(EnumType):
        delattr(EnumType, "__getattr__")
