"""The engines and the gateway as processes: started with their output in a file, and always stopped."""

from __future__ import annotations

import json
import sys
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.request import urlopen

from lab.common.processes import HOST, free_ports, running, wait_until_ready

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path


@dataclass(frozen=True, slots=True)
class Engines:
    """A process with all engines in it."""

    prefill: Sequence[int]
    decode: Sequence[int]

    def ask(self, path: str) -> Any:
        """What one of them answers to a GET."""
        with urlopen(f"http://{HOST}:{self.prefill[0]}{path}", timeout=30) as answer:
            return json.load(answer)


@contextmanager
def engines(prefillers: int, decoders: int, logs: Path) -> Iterator[Engines]:
    """So many of them."""
    ports = free_ports(prefillers + decoders)
    each = Engines(ports[:prefillers], ports[prefillers:])
    lists = [",".join(map(str, role)) for role in (each.prefill, each.decode)]
    command = [sys.executable, "-m", "lab.common.scripted.engines", *lists]
    with running("the engines", command, ports[-1], logs / "engines.log"):
        yield each


@contextmanager
def gateway(engines: Engines, workers: int, logs: Path, settings: Mapping[str, str]) -> Iterator[tuple[int, int]]:
    """The gateway in front of them; its port, and its process. `settings` are environment variables."""
    (port,) = free_ports(1)
    command = [sys.executable, "-m", "proxy", "--port", str(port), "--workers", str(workers)]
    for flag, ports in (("--prefill", engines.prefill), ("--decode", engines.decode)):
        for engine in ports:
            command += [flag, f"{HOST}:{engine}"]
    environment = {"PROXY_DRAIN__STREAMS_SECONDS": "1", **settings}
    with running("the gateway", command, port, logs / f"gateway-{workers}.log", environment) as pid:
        wait_until_ready("the gateway", port, "/readyz")
        yield port, pid
