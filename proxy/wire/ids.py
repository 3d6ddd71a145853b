"""Makes random IDs for requests, and for the attempts at each request."""

from __future__ import annotations

import os
from typing import Final

_ID_BYTES: Final = 16
_IDS_PER_BLOCK: Final = 256

# Drawn from the system's generator a block at a time: a system call for each id costs more than all else about it.
_unused_ids: list[str] = []


def make_request_id() -> str:
    """Return 128 random bits as 32 hexadecimal digits.

    The ID cannot be guessed, and no other process has the same one.
    """
    if not _unused_ids:
        drawn = os.urandom(_ID_BYTES * _IDS_PER_BLOCK).hex()
        _unused_ids.extend(drawn[start : start + 2 * _ID_BYTES] for start in range(0, len(drawn), 2 * _ID_BYTES))
    return _unused_ids.pop()


# A forked process must not have what its parent is about to give out.
os.register_at_fork(after_in_child=_unused_ids.clear)
