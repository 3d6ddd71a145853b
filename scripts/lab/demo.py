"""The demo: engines and gateway start, an answer streams, and its decoder is killed in the middle.

The answer is resumed, and equals an undisturbed one. Only the standard library is used. Everything listens on
127.0.0.1, stops when the demo ends, and leaves no files behind.
"""

from __future__ import annotations

import http.client
import json
import re
import signal
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from typing import Any, Final

from lab.common.fleet import Fleet, Gateway
from lab.common.processes import HOST, fetch, quiet_ports, unwind_on_signals

GATEWAY_PORT: Final = 1999
MODEL: Final = "demo"
QUESTION: Final = "Who computed my prompt, and who writes this?"
TOKENS: Final = 110
KILL_AFTER_PIECES: Final = 50
"""Number of pieces of the answer before the decoder is killed."""
MORE_REQUESTS: Final = 18
SHOWN: Final = re.compile(r"^pdproxy_(?:instance_requests|resumes|resumed_tokens)_total.* [1-9].*$", re.MULTILINE)


def main(port: int | None = None) -> None:
    """Run the demo. `port`: port of the gateway; None: 1999 if it is free."""
    unwind_on_signals()
    with Fleet() as fleet:
        gateway = start(fleet, port or gateway_port())
        print(f"\nready: {gateway.url}\n\nPOST /v1/chat/completions, streamed:\n")
        streamed = streamed_answer(gateway, fleet)
        is_same = streamed == whole_answer(gateway, QUESTION, TOKENS)
        print(f"\nThe same question again, undisturbed: {'the same answer' if is_same else 'another answer!'}.")
        with ThreadPoolExecutor(4) as executor:
            list(executor.map(lambda number: whole_answer(gateway, f"Question {number}", 8), range(MORE_REQUESTS)))
        print(f"\nAfter {MORE_REQUESTS} more requests {gateway.url}/metrics has, among others:\n")
        print("\n".join(f"  {line}" for line in SHOWN.findall(gateway.metrics())))
        if sys.stdin.isatty():
            print(f"\n{gateway.url} serves model {MODEL} until you press Enter.", end=" ", flush=True)
            sys.stdin.readline()
    print("\neverything is stopped")
    sys.exit(not is_same)


def gateway_port() -> int:
    try:
        socket.create_server((HOST, GATEWAY_PORT)).close()
    except OSError:
        (port,) = quiet_ports(1)
        print(f"port {GATEWAY_PORT} is taken: the gateway uses {port} instead")
        return port
    return GATEWAY_PORT


def start(fleet: Fleet, port: int) -> Gateway:
    """Start engines and the gateway in front of them."""
    for role in ("prefill", "prefill", "decode", "decode"):
        show(fleet.mock_engine(role, "--model", MODEL, "--decode-step-ms", "20").command)
    gateway = fleet.gateway(port=port)
    show(gateway.command)
    return fleet.keep(gateway)


def show(command: Sequence[str]) -> None:
    print("starting pdproxy", *command[3:])


@contextmanager
def chat(gateway: Gateway, question: str, *, stream: bool, max_tokens: int) -> Iterator[http.client.HTTPResponse]:
    messages = [{"role": "user", "content": question}]
    body = json.dumps({"model": MODEL, "messages": messages, "max_tokens": max_tokens, "stream": stream})
    with closing(http.client.HTTPConnection(HOST, gateway.port, timeout=30)) as connection:
        connection.request("POST", "/v1/chat/completions", body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        if answer.status != 200:
            sys.exit(f"the gateway answered {answer.status}: {answer.read().decode()}")
        yield answer


def streamed_answer(gateway: Gateway, fleet: Fleet) -> str:
    """Print the answer while it arrives, and kill its decoder. Return the text."""
    pieces: list[str] = []
    with chat(gateway, QUESTION, stream=True, max_tokens=TOKENS) as answer:
        for line in answer:
            data = line.strip().removeprefix(b"data: ")
            if data == b"[DONE]":
                print()
                return "".join(pieces)
            for choice in json.loads(data)["choices"] if data else ():
                pieces.append(text_of(choice["delta"]))
                print(pieces[-1], end="", flush=True)
                if len(pieces) == KILL_AFTER_PIECES:
                    kill_decoder(gateway, fleet)
    sys.exit("\nthe stream ended before it was complete")


def kill_decoder(gateway: Gateway, fleet: Fleet) -> None:
    """Kill the decoder that works on the only request."""
    decoders = {decoder.address: decoder for decoder in fleet.engines["decode"]}
    for instance in json.loads(fetch(gateway.url + "/instances"))["instances"]:
        if instance["role"] == "decode" and instance["load"]["running"]:
            decoders[instance["address"]].send(signal.SIGKILL)
            print(f"\n\n  === decoder {instance['address']}, the source of this answer, is killed ===\n", flush=True)


def whole_answer(gateway: Gateway, question: str, max_tokens: int) -> str:
    with chat(gateway, question, stream=False, max_tokens=max_tokens) as answer:
        return text_of(json.load(answer)["choices"][0]["message"])


def text_of(message: Mapping[str, Any]) -> str:
    return f"{message.get('reasoning') or ''}{message.get('content') or ''}"


if __name__ == "__main__":
    main()
