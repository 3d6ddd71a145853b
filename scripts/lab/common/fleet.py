"""Engines, gateways and other programs, which all end with the `with` block of their Fleet."""

from __future__ import annotations

import json
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Self, TypeVar

from lab.common.peers import Peer
from lab.common.proc import tree
from lab.common.processes import HOST, Program, fetch, quiet_ports
from proxy.sim.engine import SimulatedEngine

PDPROXY: Final = (sys.executable, "-m", "proxy")
STOPS_SOON: Final[dict[str, str]] = {"PROXY_DRAIN__STREAMS_SECONDS": "1"}
"""Environment of a gateway that does not wait for streams when it ends."""
_PEERS_SECONDS: Final = 10.0
AnyProgram = TypeVar("AnyProgram", bound=Program)


@dataclass(kw_only=True, eq=False)
class Gateway(Program):
    """A gateway. With `settings`, it reads a configuration file and can be reloaded."""

    ready_path: str = "/readyz"
    file: Path | None = None
    """Its configuration file."""
    settings: dict[str, Any] = field(default_factory=dict)
    """The content of that file."""

    def workers(self) -> list[int]:
        """Return the process ids of the workers; empty for a gateway of one process."""
        return tree(self.pid)[1:]

    def metrics(self) -> str:
        return fetch(self.url + "/metrics").decode()

    def figure(self, name: str) -> float:
        """Return the sum of a metric over its series, or -1 if it has none."""
        return figure(self, name)

    def reload(self, **changed: Any) -> None:
        """Reload the settings with these changes."""
        self.write(self.settings | changed)
        self.send(signal.SIGHUP)

    def write(self, settings: Mapping[str, Any]) -> None:
        """Write the configuration file. JSON is YAML, too."""
        assert self.file is not None
        self.file.write_text(json.dumps(settings, indent=1), encoding="utf-8")


class Fleet:
    """Engines and the programs in front of them. Their output goes to files in `directory`."""

    def __init__(self, directory: Path | None = None) -> None:
        """`directory`: None for a temporary one."""
        self._stack = ExitStack()
        self.directory = directory or Path(self._stack.enter_context(tempfile.TemporaryDirectory()))
        self.programs: list[Program] = []
        self.engines: dict[str, list[Program]] = {"prefill": [], "decode": []}
        """Simulated engines by role, one process each."""
        self.prefill: list[int] = []
        """Ports of all prefillers."""
        self.decode: list[int] = []
        """Ports of all decoders."""
        self._addresses: list[str] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all programs, and remove a temporary directory."""
        for program in self.programs:
            program.send(signal.SIGTERM)
        for program in reversed(self.programs):
            program.end()
        self._stack.close()

    def begin(self, program: AnyProgram) -> AnyProgram:
        """Run a program until the fleet is closed, without waiting for its start."""
        self.programs.append(program)
        program.start()
        return program

    def wait(self) -> None:
        """Wait until all programs answer."""
        for program in self.programs:
            program.wait()

    def keep(self, program: AnyProgram) -> AnyProgram:
        """Run a program until the fleet is closed, and wait until it answers."""
        self.begin(program).wait()
        return program

    # Engines

    def mock_engine(
        self,
        role: str,
        *flags: str,
        port: int = 0,
        host: str = HOST,
        bootstrap: bool = False,
        words: Sequence[str] = PDPROXY,
    ) -> Program:
        """Start `pdproxy mock-engine`. The next gateway or program waits for it.

        `bootstrap`: give it a bootstrap port, as SGLang's prefillers have.
        """
        drawn, bootstrap_port = quiet_ports(2)
        port = port or drawn
        command = [*words, "mock-engine", "--role", role, "--host", host, "--port", str(port), *flags]
        command += ["--bootstrap-port", str(bootstrap_port)] if bootstrap else []
        output = self.directory / f"{role}-{len(self.programs)}.log"
        engine = Program(name=f"{role} {host}:{port}", command=command, port=port, output=output, host=host)
        self.engines.setdefault(role, []).append(engine)
        {"prefill": self.prefill, "decode": self.decode}.get(role, []).append(port)
        self._addresses += [f"--{role}", engine.url, *([str(bootstrap_port)] if bootstrap else [])]
        return self.begin(engine)

    def mock_engines(self, prefillers: int, decoders: int, *flags: str) -> None:
        """Start several of them, all with the same flags."""
        for role, count in (("prefill", prefillers), ("decode", decoders)):
            for _ in range(count):
                self.mock_engine(role, *flags)

    def cheap_engines(self, prefillers: int, decoders: int, *flags: str, under: Sequence[str] = ()) -> None:
        """Start `lab.common.engines`: one process that is all engines and costs next to nothing."""
        ports = quiet_ports(prefillers + decoders)
        self.prefill, self.decode = ports[:prefillers], ports[prefillers:]
        lists = [",".join(map(str, role)) for role in (self.prefill, self.decode)]
        command = [*under, sys.executable, "-m", "lab.common.engines", *lists, *flags]
        output = self.directory / f"engines-{len(self.programs)}.log"
        self._addresses = [word for port in self.prefill for word in ("--prefill", f"{HOST}:{port}")]
        self._addresses += [word for port in self.decode for word in ("--decode", f"{HOST}:{port}")]
        self.keep(Program(name="the engines", command=command, port=ports[-1], output=output))

    def ask_engines(self, path: str) -> Any:
        """Return what the process of the cheap engines answers to a GET."""
        return json.loads(fetch(f"http://{HOST}:{self.prefill[0]}{path}"))

    # Programs in front of the engines

    def gateway(
        self,
        *flags: str,
        port: int = 0,
        environment: Mapping[str, str] | None = None,
        words: Sequence[str] = PDPROXY,
        finds_engines: bool = False,
    ) -> Gateway:
        """Return a gateway in front of all engines so far. Run it by `with`, or by `keep`.

        `finds_engines`: start it without their addresses.
        """
        self.wait()
        port = port or quiet_ports(1)[0]
        output = self.directory / f"gateway-{port}.log"
        addresses = () if finds_engines else self._addresses
        command = [*words, "--port", str(port), *addresses, *flags]
        return Gateway(name="the gateway", command=command, port=port, output=output, environment=environment or {})

    def configured(self, name: str, settings: dict[str, Any], output: int | None = None) -> Gateway:
        """Return a gateway with a configuration file. `output`: a descriptor for its output instead of a file."""
        file, port = self.directory / f"{name}.yaml", settings["listen"]["port"]
        log = self.directory / f"{name}.log" if output is None else output
        command = [*PDPROXY, "--config", str(file)]
        gateway = Gateway(name=name, command=command, port=port, output=log, file=file, settings=settings)
        gateway.write(settings)
        return gateway

    def program(self, peer: Peer, *flags: str, under: Sequence[str] = (), saturating: bool = False) -> Program:
        """Return a peer in front of all engines so far. Run it by `with`, or by `keep`."""
        self.wait()
        (port,) = quiet_ports(1)
        command = [*under, *peer.command(port, self.prefill, self.decode, saturating=saturating), *flags]
        output = self.directory / f"{peer.name.replace(' ', '-')}-{port}.log"
        return Program(name=peer.name, command=command, port=port, output=output, ready_path=peer.ready_path)


@asynccontextmanager
async def simulated(role: str, count: int, **options: Any) -> AsyncIterator[list[SimulatedEngine]]:
    """Run simulated engines in this process. Their ports stay the same when they restart."""
    async with AsyncExitStack() as stack:
        made = [SimulatedEngine(role=role, port=port, **options) for port in sorted(quiet_ports(count))]
        yield [await stack.enter_async_context(engine) for engine in made]


def addresses(engines: Iterable[SimulatedEngine]) -> list[str]:
    """Return the addresses of engines for a gateway's configuration."""
    return [f"{engine.host}:{engine.port}" for engine in engines]


def store(port: int, directory: Path) -> Program:
    """Return a Redis or Valkey server for gateways that share state. It writes nothing to disk."""
    server = shutil.which("valkey-server") or shutil.which("redis-server")
    if server is None:
        sys.exit("there is neither valkey-server nor redis-server")
    command = [server, "--port", str(port), "--bind", HOST, "--save", "", "--appendonly", "no", "--dir", str(directory)]
    return Program(name="the store", command=command, port=port, output=directory / "store.log")


def store_url(port: int) -> str:
    """Return the value for `replicas.url`."""
    return f"redis://{HOST}:{port}/0"


def figure(gateway: Program, name: str) -> float:
    """Return the sum of a gateway's metric over its series, or -1 if it has none."""
    text = fetch(gateway.url + "/metrics").decode()
    found = re.findall(rf"^pdproxy_{name}(?:\{{.*\}})? (\S+)$", text, re.MULTILINE)
    return sum(map(float, found)) if found else -1.0


def wait_for_peers(gateways: Sequence[Program], of: int) -> None:
    """Wait until each gateway knows this number of others. Exits after 10 s."""
    deadline = time.monotonic() + _PEERS_SECONDS
    while any(figure(gateway, "replicas_peers") != of for gateway in gateways):
        if time.monotonic() > deadline:
            sys.exit(f"not every gateway knows {of} others within {_PEERS_SECONDS:g} s")
        time.sleep(0.05)
