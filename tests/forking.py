"""A second process, for tests of shared memory."""

from __future__ import annotations

import os
from collections.abc import Callable


def in_child(action: Callable[[], object]) -> None:
    """Run a callable in a forked process and expect it to succeed."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            action()
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
