"""The demo, with nothing but the standard library: engines and gateway are started, an answer streams, and the decoder
that writes it is killed in the middle. The answer goes on, and is the same as without.

Everything listens on 127.0.0.1, stops when the demo ends and leaves nothing behind.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import socket
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from lab.common.invocation import unwind_on_signals
from lab.common.processes import HOST, free_ports, running, wait_until_ready

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

GATEWAY_PORT: Final = 1999
MODEL: Final = "demo"
QUESTION: Final = "Who computed my prompt, and who writes this?"
TOKENS: Final = 110
KILLED_AFTER: Final = 50
"""Pieces of the answer."""
MORE_REQUESTS: Final = 18
SHOWN: Final = re.compile(r"^pdproxy_(?:instance_requests|resumes|resumed_tokens)_total.* [1-9].*$", re.MULTILINE)


def main() -> None:
    """Bring everything up, use it, and leave."""
    unwind_on_signals()
    port = gateway_port()
    with ExitStack() as stack:
        pids = start(stack, port)
        print(f"\nready: http://{HOST}:{port}\n\nPOST /v1/chat/completions, streamed:\n")
        told = streamed_answer(port, pids)
        is_same = told == whole_answer(port, QUESTION, TOKENS)
        print(f"\nThe same question once more, undisturbed: {'the same answer' if is_same else 'another answer!'}.")
        with ThreadPoolExecutor(4) as executor:
            list(executor.map(lambda number: whole_answer(port, f"Question {number}", 8), range(MORE_REQUESTS)))
        print(f"\nAfter {MORE_REQUESTS} more requests http://{HOST}:{port}/metrics has, among others:\n")
        print("\n".join(f"  {line}" for line in SHOWN.findall(get(port, "/metrics"))))
        if sys.stdin.isatty():
            print(f"\nhttp://{HOST}:{port} serves model {MODEL} until you press Enter.", end=" ", flush=True)
            sys.stdin.readline()
    print("\neverything is stopped again")
    sys.exit(not is_same)


def gateway_port() -> int:
    try:
        socket.create_server((HOST, GATEWAY_PORT)).close()
    except OSError:
        (port,) = free_ports(1)
        print(f"port {GATEWAY_PORT} is taken: the gateway uses {port} instead")
        return port
    return GATEWAY_PORT


def start(stack: ExitStack, port: int) -> dict[str, int]:
    """Engines and gateway; the engines' process ids by address."""
    directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))

    def run(name: str, port: int, *arguments: object) -> int:
        command = [sys.executable, "-m", "proxy", *map(str, arguments)]
        return stack.enter_context(running(name, command, port, directory / f"{name}.log"))

    ports = free_ports(4)
    engines: list[str] = []
    with ThreadPoolExecutor(4) as executor:
        started = []
        for role, engine in zip(("prefill", "prefill", "decode", "decode"), ports, strict=True):
            words = ("mock-engine", "--role", role, "--port", engine, "--model", MODEL, "--decode-step-ms", 20)
            print("starting pdproxy", *words)
            started.append(executor.submit(run, f"{role} {engine}", engine, *words))
            engines += [f"--{role}", f"http://{HOST}:{engine}"]
        pids = {f"{HOST}:{engine}": one.result() for engine, one in zip(ports, started, strict=True)}
    print("starting pdproxy --port", port, *engines)
    run("gateway", port, "--port", port, *engines)
    wait_until_ready("the gateway", port, "/readyz")
    return pids


@contextmanager
def chat(port: int, question: str, *, stream: bool, max_tokens: int) -> Iterator[http.client.HTTPResponse]:
    messages = [{"role": "user", "content": question}]
    body = json.dumps({"model": MODEL, "messages": messages, "max_tokens": max_tokens, "stream": stream})
    with closing(http.client.HTTPConnection(HOST, port, timeout=30)) as connection:
        connection.request("POST", "/v1/chat/completions", body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        if answer.status != 200:
            sys.exit(f"the gateway answered {answer.status}: {answer.read().decode()}")
        yield answer


def streamed_answer(port: int, pids: Mapping[str, int]) -> str:
    """Print the answer while it arrives, and kill who writes it; its text."""
    pieces: list[str] = []
    with chat(port, QUESTION, stream=True, max_tokens=TOKENS) as answer:
        for line in answer:
            data = line.strip().removeprefix(b"data: ")
            if data == b"[DONE]":
                print()
                return "".join(pieces)
            for choice in json.loads(data)["choices"] if data else ():
                pieces.append(said(choice["delta"]))
                print(pieces[-1], end="", flush=True)
                if len(pieces) == KILLED_AFTER:
                    kill_decoder(port, pids)
    sys.exit("\nthe stream ended before it was complete")


def kill_decoder(port: int, pids: Mapping[str, int]) -> None:
    """The one that works on the only request."""
    for instance in json.loads(get(port, "/instances"))["instances"]:
        if instance["role"] == "decode" and instance["load"]["running"]:
            os.kill(pids[instance["address"]], signal.SIGKILL)
            print(f"\n\n  === decoder {instance['address']}, which has written this, is killed ===\n", flush=True)


def whole_answer(port: int, question: str, max_tokens: int) -> str:
    with chat(port, question, stream=False, max_tokens=max_tokens) as answer:
        return said(json.load(answer)["choices"][0]["message"])


def said(message: Mapping[str, Any]) -> str:
    return f"{message.get('reasoning') or ''}{message.get('content') or ''}"


def get(port: int, path: str) -> str:
    with closing(http.client.HTTPConnection(HOST, port, timeout=5)) as connection:
        connection.request("GET", path)
        return connection.getresponse().read().decode()


if __name__ == "__main__":
    main()
