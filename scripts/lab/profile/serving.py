"""A gateway to be looked at, as it is started by default."""

from __future__ import annotations

import sys
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from lab.common import peers
from lab.common.processes import free_ports, running, wait_until_ready

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@contextmanager
def serving(directory: Path, *under: str, there: Path | None = None) -> Iterator[tuple[int, int]]:
    """Two simulated prefillers, two decoders and the gateway in front of them, ready. Their output goes into
    `directory`. `under`: the words of a program that runs the gateway. `there`: the directory that has the gateway;
    None: the project's. Yields the gateway's process id and its port.
    """
    with ExitStack() as stack:
        prefill, decode, (port,) = free_ports(2), free_ports(2), free_ports(1)
        words = (",".join(map(str, prefill)), ",".join(map(str, decode)))
        engines = [sys.executable, "-m", "lab.bench.engines", *words]
        stack.enter_context(running("the engines", engines, decode[-1], directory / "engines"))
        peer = peers.ours(there)
        command = [*under, *peer.command(port, prefill, decode)]
        pid = stack.enter_context(running(peer.name, command, port, directory / "gateway"))
        wait_until_ready(peer.name, port, peer.ready_path)
        yield pid, port
