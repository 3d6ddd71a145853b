"""The demo, with nothing but the standard library: start engines and gateway, stream an answer, show who did what.

Everything listens on 127.0.0.1, stops when the demo ends and leaves nothing behind.
"""

from __future__ import annotations

import http.client
import json
import re
import socket
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from lab.common.invocation import unwind_on_signals
from lab.common.processes import HOST, free_ports, running, wait_until_ready

if TYPE_CHECKING:
    from collections.abc import Iterator

GATEWAY_PORT = 1999
MODEL = "demo"
MORE_REQUESTS = 19


def gateway_port() -> int:
    try:
        socket.create_server((HOST, GATEWAY_PORT)).close()
    except OSError:
        (port,) = free_ports(1)
        print(f"port {GATEWAY_PORT} is taken: the gateway uses {port} instead")
        return port
    return GATEWAY_PORT


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
    with closing(http.client.HTTPConnection(HOST, port, timeout=5)) as connection:
        connection.request("GET", "/metrics")
        metrics = connection.getresponse().read().decode()
    samples = re.findall(r"^pdproxy_instance_requests_total\{(.*)\} (\S+)$", metrics, re.MULTILINE)
    for labels, value in sorted(samples, key=lambda sample: 'role="prefill"' not in sample[0]):
        label = dict(re.findall(r'(\w+)="([^"]*)"', labels))
        if float(value) > 0:
            print(f"  {label['role']:8} {label['address']:16} {label['result']:10} {float(value):3.0f} requests")


def main() -> None:
    """Bring everything up, use it, and leave."""
    unwind_on_signals()
    port = gateway_port()
    ports = free_ports(4)
    prefill, decode = ports[:2], ports[2:]
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))

        def start(name: str, port: int, *arguments: object) -> None:
            command = [sys.executable, "-m", "proxy", *map(str, arguments)]
            stack.enter_context(running(name, command, port, directory / f"{name}.log"))

        for role, role_ports in (("prefill", prefill), ("decode", decode)):
            for number, engine in enumerate(role_ports, 1):
                print(f"starting simulated {role} engine on {HOST}:{engine}")
                flags = ("--role", role, "--host", HOST, "--port", engine, "--model", MODEL, "--decode-step-ms", 20)
                start(f"{role}-{number}", engine, "mock-engine", *flags)
        prefillers = ("--prefiller-hosts", HOST, HOST, "--prefiller-ports", *prefill)
        decoders = ("--decoder-hosts", HOST, HOST, "--decoder-ports", *decode)
        command = ("--host", HOST, "--port", port, *prefillers, *decoders)
        print("starting the gateway: pdproxy", *command)
        start("gateway", port, *command)
        wait_until_ready("the gateway", port, "/readyz")

        print(f"\nPOST http://{HOST}:{port}/v1/chat/completions, streamed:\n")
        stream_answer(port)
        with ThreadPoolExecutor(4) as executor:
            list(executor.map(lambda number: whole_answer(port, number), range(MORE_REQUESTS)))
        print(f"\nafter {MORE_REQUESTS} more requests, /metrics says:\n")
        print_request_counts(port)
    print("\neverything is stopped again")


if __name__ == "__main__":
    main()
