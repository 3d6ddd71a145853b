"""The engines and the gateway as processes: started with their output in a file, always stopped, and looked at."""

from __future__ import annotations

import json
import os
import resource
import sys
from collections import Counter
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.request import urlopen

from benchmark.processes import HOST, free_ports, running, wait_until_ready

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence


def allow_many_files() -> None:
    """As many as the system lets us open, here and in what is started from here."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


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
    command = [sys.executable, "-m", "measuring.engines", *lists]
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


def tree(pid: int) -> list[int]:
    """A process and its descendants, parents first."""
    members = [pid]
    for member in members:
        members += [int(child) for child in Path(f"/proc/{member}/task/{member}/children").read_text().split()]
    return members


def connections(pid: int, port: int) -> Counter[int]:
    """How many connections each descendant of a process, or it alone, has accepted on a port and not closed."""
    established = set()
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[1].endswith(f":{port:04X}") and fields[3] == "01":
            established.add(f"socket:[{fields[9]}]")
    counts: Counter[int] = Counter()
    for member in tree(pid):
        with suppress(OSError):
            for descriptor in Path(f"/proc/{member}/fd").iterdir():
                with suppress(OSError):
                    counts[member] += os.readlink(descriptor) in established
    return +counts


@dataclass(frozen=True, slots=True)
class Memory:
    """Of a process and its descendants, in bytes. `shared_out`: what several processes have is divided among them."""

    resident: int
    shared_out: int


def memory(pid: int) -> Memory:
    """What they use now."""
    sums = {"Rss": 0, "Pss": 0}
    for member in tree(pid):
        for line in Path(f"/proc/{member}/smaps_rollup").read_text().splitlines():
            name, _, rest = line.partition(":")
            if name in sums:
                sums[name] += int(rest.split()[0]) * 1024
    return Memory(sums["Rss"], sums["Pss"])
