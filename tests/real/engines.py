"""Real vLLM engines and the gateway as processes of this machine.

Everything listens on 127.0.0.1. Each process is the head of a session of its own, so that whatever it started ends
with it, and its output is in a file.
"""

from __future__ import annotations

import http.client
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from contextlib import closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from tests.real.orders import Orders

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

HOST = "127.0.0.1"
MODEL = "tiny"
# Five engines load at the same time on, perhaps, two cores.
READY_SECONDS = 600.0
STOP_SECONDS = 20.0

_PROJECT = Path(__file__).parents[2]

# Nothing goes out or comes in from elsewhere, and one thread each, because there are more engines than cores.
_ENGINE_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_HOST_IP": HOST,
    "VLLM_NIXL_SIDE_CHANNEL_HOST": HOST,
    "GLOO_SOCKET_IFNAME": "lo",
    "UCX_NET_DEVICES": "lo",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
}

_ENGINE_FLAGS = {
    "--served-model-name": MODEL,
    "--host": HOST,
    "--dtype": "float32",
    "--max-model-len": "4096",
    "--max-num-seqs": "16",
    "--kv-cache-memory-bytes": str(64 << 20),
    "--block-size": "32",
}


def free_ports() -> Iterator[int]:
    """Ports nobody uses now.

    Not those the kernel gives away: an engine takes its port when it has loaded, and engines that load meanwhile are
    given hundreds.
    """
    for port in random.sample(range(20_000, 30_000), 10_000):
        try:
            socket.create_server((HOST, port)).close()
        except OSError:
            continue
        yield port


class Program:
    """One process that serves HTTP."""

    def __init__(
        self, name: str, port: int, command: Sequence[object], log: Path, environment: Mapping[str, str]
    ) -> None:
        self.name = name
        self.port = port
        self.log = log
        self._command = [str(word) for word in command]
        self._environment = dict(environment)
        self.start()

    def start(self) -> None:
        """Start it; once more, after its end, with the same port and the same log."""
        with self.log.open("ab") as output:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=self._environment,
                start_new_session=True,
            )

    def wait_until_ready(self, path: str) -> None:
        """Until `path` answers 200."""
        deadline = time.monotonic() + READY_SECONDS
        while not self._answers(path):
            if self._process.poll() is not None or time.monotonic() > deadline:
                end = "\n".join(self.log.read_text(errors="replace").splitlines()[-30:])
                raise RuntimeError(f"{self.name} did not become ready; its output, {self.log}, ends with:\n{end}")
            time.sleep(0.25)

    def _answers(self, path: str) -> bool:
        try:
            with closing(http.client.HTTPConnection(HOST, self.port, timeout=10)) as connection:
                connection.request("GET", path)
                return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False

    def terminate(self) -> None:
        self._process.terminate()

    def wait(self) -> None:
        """Wait for the end; what is left of the session then is killed."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_SECONDS)
        self.kill()

    def kill(self) -> None:
        """`kill -9` for every process of the session that does anything.

        Not for Python's resource trackers, which remove the shared memory that the others have left, and end.
        """
        for directory in Path("/proc").glob("[0-9]*"):
            pid = int(directory.name)
            with suppress(OSError):  # processes come and go
                is_ours = os.getsid(pid) == self._process.pid
                if is_ours and b"multiprocessing.resource_tracker" not in (directory / "cmdline").read_bytes():
                    os.kill(pid, signal.SIGKILL)
        self._process.wait()


def stop(programs: Iterable[Program]) -> None:
    programs = list(programs)
    for program in programs:
        program.terminate()
    for program in programs:
        program.wait()


class Engines:
    """Engines of one model: an ordinary one, prefillers and decoders. More are started when more are asked for."""

    def __init__(self, venv: Path, directory: Path) -> None:
        """`venv`: where vLLM is installed. `directory`: for the model, the logs and the engines' caches."""
        self.python = venv / "bin" / "python"
        self.model = directory / "model"
        self.single: list[Program] = []
        self.prefillers: list[Program] = []
        self.decoders: list[Program] = []
        self.ports = free_ports()
        """For engines and gateways alike, so that none is given twice."""
        self.orders = Orders(directory / "orders")
        """What makes a decoder end a request as `recomputed`."""
        self.flags: dict[str, str] = {}
        """For the engines that are started from now on."""
        self._directory = directory
        self._environment = {
            **os.environ,
            **_ENGINE_ENVIRONMENT,
            "PROXY_DRAIN__NOT_READY_SECONDS": "0",
            "VLLM_CACHE_ROOT": str(directory / "cache"),
            "PATH": f"{venv / 'bin'}:{os.environ['PATH']}",
        }

    def make_model(self, *kind: str) -> None:
        """For the engines that are started from now on; see make_tiny_model.py for the kinds."""
        self.run([__file__.replace("engines.py", "make_tiny_model.py"), self.model, *kind])

    def run(self, arguments: Sequence[object], timeout_seconds: float = 600) -> str:
        """Run the engines' Python and return what it printed. Raises RuntimeError with the output if it fails."""
        done = subprocess.run(
            [str(word) for word in (self.python, *arguments)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=self._environment,
            cwd=self._directory,
            timeout=timeout_seconds,
            text=True,
        )
        if done.returncode:
            raise RuntimeError(f"{arguments[0]} failed:\n{done.stdout}")
        return done.stdout

    def need(self, prefillers: int, decoders: int) -> None:
        """Wait until there are so many, and the ordinary engine."""
        missing = [
            *(self._start("single", self.single, None) for _ in range(1 - len(self.single))),
            *(self._start("prefill", self.prefillers, "kv_producer") for _ in range(prefillers - len(self.prefillers))),
            *(self._start("decode", self.decoders, "kv_consumer") for _ in range(decoders - len(self.decoders))),
        ]
        for engine in missing:
            engine.wait_until_ready("/health")

    def stop(self) -> None:
        """Stop all of them; they are missing then, for `need`."""
        stop([*self.single, *self.prefillers, *self.decoders])
        for programs in (self.single, self.prefillers, self.decoders):
            programs.clear()

    def _start(self, kind: str, engines: list[Program], kv_role: str | None) -> Program:
        port, side_channel_port = next(self.ports), next(self.ports)
        name = f"{kind}-{len(engines) + 1}"
        flags = _ENGINE_FLAGS | self.flags | {"--port": str(port)}
        environment = dict(self._environment)
        if kv_role:
            transfer = {"kv_connector": "NixlConnector", "kv_role": kv_role, "kv_buffer_device": "cpu"}
            flags["--kv-transfer-config"] = json.dumps(transfer)
            environment["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(side_channel_port)
        if kv_role == "kv_consumer":
            flags["--scheduler-cls"] = "tests.real.recompute_scheduler.RecomputeScheduler"
            environment["PYTHONPATH"] = str(_PROJECT)
            environment["PDPROXY_RECOMPUTE_ORDERS"] = str(self._directory / "orders")
        command = [self.python, "-m", "vllm.entrypoints.cli.main", "serve", self.model]
        command += [word for flag in flags.items() for word in flag]
        command += ["--enforce-eager", "--enable-prompt-tokens-details"]
        engines.append(Program(name, port, command, self._directory / f"{name}.log", environment))
        return engines[-1]


def start_gateway(
    port: int, prefillers: Sequence[Program], decoders: Sequence[Program], log: Path, **variables: str
) -> Program:
    """`python -m proxy` in front of these, with more variables in its environment."""
    command: list[object] = [sys.executable, "-m", "proxy", "--host", HOST, "--port", port, "--log-format", "json"]
    for noun, engines in (("prefiller", prefillers), ("decoder", decoders)):
        command += [f"--{noun}-hosts", *(HOST for _ in engines), f"--{noun}-ports", *(e.port for e in engines)]
    # What is set for another gateway must not change this one.
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("PROXY_", "OPENAI_"))}
    gateway = Program("gateway", port, command, log, environment | variables)
    try:
        gateway.wait_until_ready("/readyz")
    except BaseException:
        stop([gateway])
        raise
    return gateway
