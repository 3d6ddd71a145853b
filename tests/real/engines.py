"""The real engines of one stack, as processes of this machine."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path

from tests.real.families import VLLM, Options
from tests.real.orders import Orders
from tests.real.programs import Program, free_ports, stop
from tests.real.stacks import Kind, Place, Stack

# Engines download nothing, and have one thread each, because there are more engines than cores.
_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "OMP_NUM_THREADS": "1",
}


class Engines:
    """Engines of one stack and one model: a single one, prefillers and decoders. They are started when needed."""

    def __init__(self, stack: Stack, directory: Path) -> None:
        """`directory` is for the model, the logs, and the files that the engines share."""
        self.stack = stack
        self.model = directory / "model"
        self.single: list[Program] = []
        self.prefillers: list[Program] = []
        self.decoders: list[Program] = []
        self.ports: Iterator[int] = free_ports()
        """Ports of engines and gateways, so that no port is used twice."""
        self.orders = Orders(directory / "orders")
        """Orders with which tests make a decoder end a request as `recomputed`."""
        self.directory = directory
        self._services: list[Program] = []
        self.run([Path(__file__).with_name("make_tiny_model.py"), self.model, *filter(None, [stack.model])])

    def run(self, arguments: Sequence[object], timeout_seconds: float = 600) -> str:
        """Run vLLM's Python and return what it printed. Raises RuntimeError with the output if it fails."""
        done = subprocess.run(
            [str(word) for word in (_venv(VLLM.venv_variable) / "bin" / "python", *arguments)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=self.environment(VLLM.venv_variable, VLLM.options.environment),
            cwd=self.directory,
            timeout=timeout_seconds,
            text=True,
        )
        if done.returncode:
            raise RuntimeError(f"{arguments[0]} failed:\n{done.stdout}")
        return done.stdout

    def need(self, prefillers: int, decoders: int, single: int = 1) -> None:
        """Start missing engines up to these numbers, and wait until they are ready."""
        if self.stack.service and not self._services:
            self._start_service(self.stack.service)
        missing = [
            *(self._start("single", self.single) for _ in range(single - len(self.single))),
            *(self._start("prefill", self.prefillers) for _ in range(prefillers - len(self.prefillers))),
            *(self._start("decode", self.decoders) for _ in range(decoders - len(self.decoders))),
        ]
        for engine in missing:
            engine.wait_until_ready("/health")

    def stop(self) -> None:
        """Stop all engines; `need` starts new ones."""
        for programs in (self.single + self.prefillers + self.decoders, self._services):
            stop(programs)
        for programs in (self.single, self.prefillers, self.decoders, self._services):
            programs.clear()

    def _start_service(self, service: Callable[[Place], Sequence[str]]) -> None:
        variable = self.stack.family.venv_variable
        place = Place("single", next(self.ports), next(self.ports), self.directory)
        name, *arguments = service(place)
        command = [_venv(variable) / "bin" / name, *arguments]
        program = Program(name, place.port, command, self.directory / f"{name}.log", self.environment(variable, {}))
        self._services.append(program)
        program.wait_until_ready("/health")

    def _start(self, kind: Kind, engines: list[Program]) -> Program:
        family = self.stack.family
        place = Place(kind, next(self.ports), next(self.ports), self.directory)
        options = Options() if kind == "single" else self.stack.options(place)
        flags = {**family.options.flags, **self.stack.flags, **options.flags, "--port": str(place.port)}
        python = _venv(family.venv_variable) / "bin" / "python"
        arguments = filter(None, chain.from_iterable(flags.items()))
        name = f"{kind}-{len(engines) + 1}"
        program = Program(
            name,
            place.port,
            [python, *family.command, self.model, *arguments],
            self.directory / f"{name}.log",
            self.environment(family.venv_variable, {**family.options.environment, **options.environment}),
            place.second_port if kind == "prefill" and self.stack.has_bootstrap else None,
            options.per_start,
        )
        engines.append(program)
        return program

    def environment(self, venv_variable: str, more: Mapping[str, str]) -> dict[str, str]:
        venv = _venv(venv_variable)
        # scripts/test-real puts libraries here that Mooncake is linked with, if the machine has none.
        libraries = _venv(VLLM.venv_variable) / "libibverbs"
        return {
            **os.environ,
            **_ENVIRONMENT,
            "VLLM_CACHE_ROOT": str(self.directory / "cache"),
            "PATH": f"{venv / 'bin'}:{os.environ['PATH']}",
            **({"LD_LIBRARY_PATH": str(libraries)} if libraries.is_dir() else {}),
            **more,
        }


def _venv(variable: str) -> Path:
    return Path(os.environ[variable]).absolute()
