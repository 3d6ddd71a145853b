"""The store of gateways that share what they know: a real server, which keeps nothing on disk."""

from __future__ import annotations

import shutil
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

from lab.common.processes import HOST, running

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


def store_url(port: int) -> str:
    """For `replicas.url`."""
    return f"redis://{HOST}:{port}/0"


@contextmanager
def store(port: int, logs: Path) -> Iterator[str]:
    """Its URL. Stopped on the way out, with all that it has."""
    server = shutil.which("valkey-server") or shutil.which("redis-server")
    if server is None:
        sys.exit("there is neither valkey-server nor redis-server")
    command = [server, "--port", str(port), "--bind", HOST, "--save", "", "--appendonly", "no", "--dir", str(logs)]
    with running("the store", command, port, logs / "store.log"):
        yield store_url(port)
