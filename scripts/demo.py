"""The demo, with nothing but the standard library: start engines and gateway, stream an answer, show who did what.

Everything listens on 127.0.0.1, stops when the demo ends and leaves nothing behind.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

HOST = "127.0.0.1"
GATEWAY_PORT = 1999
READY_SECONDS = 30.0
STOP_SECONDS = 10.0
MODEL = "demo"
MORE_REQUESTS = 19


def free_ports(count: int) -> list[int]:
    """Ports nobody uses now: all are taken at the same time, so that they differ, and then let go."""
    with ExitStack() as stack:
        return [stack.enter_context(socket.create_server((HOST, 0))).getsockname()[1] for _ in range(count)]


def gateway_port() -> int:
    try:
        socket.create_server((HOST, GATEWAY_PORT)).close()
    except OSError:
        (port,) = free_ports(1)
        print(f"port {GATEWAY_PORT} is taken: the gateway uses {port} instead")
        return port
    return GATEWAY_PORT


class Program:
    """`python -m proxy …` with its output in a file."""

    def __init__(self, name: str, port: int, arguments: list[str], log: Path) -> None:
        self.name = name
        self.port = port
        self._log = log
        # What is set for another gateway must not change this one.
        environment = {key: value for key, value in os.environ.items() if not key.startswith(("PROXY_", "OPENAI_"))}
        environment["PROXY_DRAIN__NOT_READY_SECONDS"] = "0"  # no load balancer has to notice that the gateway stops
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "proxy", *arguments], stdout=output, stderr=subprocess.STDOUT, env=environment
            )

    def wait_until_ready(self, path: str) -> None:
        """Until `path` answers 200."""
        deadline = time.monotonic() + READY_SECONDS
        while True:
            try:
                if get(self.port, path)[0] == 200:
                    return
            except OSError:
                pass
            if self._process.poll() is not None or time.monotonic() > deadline:
                sys.exit(f"{self.name} did not become ready; its output:\n{self._log.read_text()}")
            time.sleep(0.05)

    def terminate(self) -> None:
        self._process.terminate()

    def wait(self) -> None:
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


@contextmanager
def running() -> Iterator[list[Program]]:
    """A list for programs, all of which are stopped in the end."""
    programs: list[Program] = []
    try:
        yield programs
    finally:
        for program in programs:
            program.terminate()
        for program in programs:
            program.wait()


def get(port: int, path: str) -> tuple[int, str]:
    with closing(http.client.HTTPConnection(HOST, port, timeout=5)) as connection:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()


@contextmanager
def chat(port: int, prompt: str, *, stream: bool, max_tokens: int) -> Iterator[http.client.HTTPResponse]:
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": max_tokens,
        "stream": stream,
    }
    with closing(http.client.HTTPConnection(HOST, port, timeout=30)) as connection:
        connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        if answer.status != 200:
            sys.exit(f"the gateway answered {answer.status}: {answer.read().decode()}")
        yield answer


def stream_answer(port: int) -> None:
    """Print the text of a streamed answer while it arrives."""
    with chat(port, "Who computed my prompt, and who writes this?", stream=True, max_tokens=120) as answer:
        for line in answer:
            data = line.strip().removeprefix(b"data: ")
            if data == b"[DONE]":
                break
            for choice in json.loads(data)["choices"] if data else ():
                delta = choice["delta"]
                print(delta.get("content") or delta.get("reasoning") or "", end="", flush=True)
        else:
            sys.exit("\nthe stream ended before it was complete")
    print()


def whole_answer(port: int, number: int) -> None:
    with chat(port, f"Question {number}", stream=False, max_tokens=8) as answer:
        json.load(answer)


def print_request_counts(port: int) -> None:
    """Who did what, as /metrics tells it."""
    samples = re.findall(r"^pdproxy_instance_requests_total\{(.*)\} (\S+)$", get(port, "/metrics")[1], re.MULTILINE)
    for labels, value in sorted(samples, key=lambda sample: 'role="prefill"' not in sample[0]):
        label = dict(re.findall(r'(\w+)="([^"]*)"', labels))
        if float(value) > 0:
            print(f"  {label['role']:8} {label['instance']:16} {label['result']:10} {float(value):3.0f} requests")


def main() -> None:
    """Bring everything up, use it, and leave."""
    # A signal unwinds like an error, so that the programs are stopped.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    port = gateway_port()
    ports = free_ports(4)
    prefill, decode = ports[:2], ports[2:]
    with tempfile.TemporaryDirectory() as directory, running() as programs:

        def start(name: str, port: int, *arguments: object) -> Program:
            programs.append(Program(name, port, [str(word) for word in arguments], Path(directory, f"{name}.log")))
            return programs[-1]

        for role, role_ports in (("prefill", prefill), ("decode", decode)):
            for number, engine_port in enumerate(role_ports, 1):
                print(f"starting simulated {role} engine on {HOST}:{engine_port}")
                start(
                    f"{role}-{number}",
                    engine_port,
                    *("mock-engine", "--role", role, "--host", HOST, "--port", engine_port, "--model", MODEL),
                    *("--decode-step-ms", 20),
                )
        for engine in programs:
            engine.wait_until_ready("/health")
        flags = ["--host", HOST, "--port", port, "--prefiller-hosts", HOST, HOST, "--prefiller-ports", *prefill]
        flags += ["--decoder-hosts", HOST, HOST, "--decoder-ports", *decode]
        print("starting the gateway: pdproxy", *flags)
        start("gateway", port, *flags).wait_until_ready("/readyz")

        print(f"\nPOST http://{HOST}:{port}/v1/chat/completions, streamed:\n")
        stream_answer(port)
        with ThreadPoolExecutor(4) as executor:
            list(executor.map(lambda number: whole_answer(port, number), range(MORE_REQUESTS)))
        print(f"\nafter {MORE_REQUESTS} more requests, /metrics says:\n")
        print_request_counts(port)
    print("\neverything is stopped again")


if __name__ == "__main__":
    main()
