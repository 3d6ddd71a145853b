"""What the commands do first: they heed signals, and know where they were called from."""

from __future__ import annotations

import os
import resource
import signal
import sys
from pathlib import Path


def called_from() -> Path:
    """The directory in which paths on the command line begin. Scripts change the directory and tell where they were."""
    return Path(os.environ.get("CALLED_FROM", "."))


def unwind_on_signals() -> None:
    """A signal unwinds like an error, so that every process is stopped."""
    for ending in (signal.SIGTERM, signal.SIGINT):
        signal.signal(ending, lambda received, _: sys.exit(128 + received))


def allow_many_files() -> None:
    """As many as the system lets us open, here and in what is started from here."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
