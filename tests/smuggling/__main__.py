"""Send every payload directly and through every proxy: `scripts/test-smuggling`."""

from __future__ import annotations

import asyncio
import re
import sys
import tempfile
from collections.abc import Iterable, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import h11
import orjson

from tests.canned import CannedEngine, Received, json_answer
from tests.scenarios.program import gateway
from tests.smuggling.fronts import FRONTS, MARK, HttpListener, missing, running
from tests.smuggling.payloads import CLOSE, INNER, PAYLOADS, Payload, request

DIRECT: Final = "direct"
SECOND_REQUEST: Final = "behind one"
"""Sent to the gateway on a connection that has served a plain request."""
NO_FAST_PATH: Final = "no fast path"
"""Sent to a gateway without the fast path."""
WITHOUT_PROXY: Final = frozenset((DIRECT, SECOND_REQUEST, NO_FAST_PATH))
_QUIET_SECONDS: Final = 0.3
_STATUS: Final = re.compile(rb"HTTP/1\.[01] ([2-5]\d\d)")


@dataclass(frozen=True)
class Outcome:
    """Result of one payload on one way."""

    statuses: tuple[int, ...]
    """Status of each answer to the client."""
    served: tuple[str, ...]
    """User that each request at the engine names."""
    forwarded: int
    """Number of requests that the proxy has marked as its own."""
    answered: int
    """Number of answers from the gateway to the proxy."""
    victim: str
    """User in the answer to the next client, on another connection: "its own", or "" without an answer."""

    def __str__(self) -> str:
        return " ".join(map(str, self.statuses)) or "-"


def echo(received: Received) -> Iterable[bytes]:
    """Return an answer that names the user of the request."""
    user = orjson.loads(received.body).get("user")
    return [json_answer({"choices": [{"index": 0, "text": user, "finish_reason": "stop"}]})]


async def exchange(port: int, raw: bytes, quiet_seconds: float = _QUIET_SECONDS, first: bytes = b"") -> bytes:
    """Write bytes on one connection, and read until it is closed or silent.

    `first`: a request that is answered before.
    """
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    received = bytearray()
    with suppress(ConnectionError):
        if first:
            writer.write(first)
            await reader.readuntil(b"}]}")
        writer.write(raw)
        with suppress(TimeoutError):
            while data := await asyncio.wait_for(reader.read(65536), quiet_seconds):
                received += data
    writer.transport.abort()
    return bytes(received)


async def try_out(
    payload: Payload, front: HttpListener, engine: CannedEngine, number: int, quiet_seconds: float = _QUIET_SECONDS
) -> Outcome:
    """Send a payload one way, and then the request of another client, which its number identifies."""
    front.take()
    seen = len(engine.received)
    answers = await exchange(front.port, payload.raw, quiet_seconds, front.first)
    up, down = front.take()
    served = tuple(orjson.loads(one.body).get("user") for one in engine.received[seen + bool(front.first) :])
    victim = f"victim-{number}"
    victim_answer = b""
    for _ in range(2):  # the proxy's connection may have been closed just before
        victim_answer = await exchange(front.port, request(victim, CLOSE), quiet_seconds)
        if b" 200 OK" in victim_answer:
            break
    match = re.search(rb'"text":"([^"]*)"', victim_answer)
    received_user = match[1].decode() if match else ""
    return Outcome(
        tuple(int(status) for status in _STATUS.findall(answers)),
        served,
        len(re.findall(MARK.encode(), up, re.IGNORECASE)),
        len(_STATUS.findall(down)),
        "its own" if received_user == victim else received_user,
    )


def disagreements(payload: Payload, way: str, outcome: Outcome) -> list[str]:
    """Return the violated conditions as sentences."""
    problems = []
    if outcome.victim != "its own":
        problems.append(f"another client got {f'the answer to {outcome.victim}' if outcome.victim else 'no answer'}")
    if outcome.statuses.count(200) != len(outcome.served):
        problems.append(f"{outcome.statuses.count(200)} good answers to {len(outcome.served)} requests at the engine")
    if way in WITHOUT_PROXY:
        if payload.served is not None and outcome.served != payload.served:
            problems.append(f"the engine saw {outcome.served or 'nothing'} instead of {payload.served or 'nothing'}")
        if INNER in outcome.served:
            problems.append("a hidden request was found")
        if payload.served == () and not all(status >= 400 for status in outcome.statuses):
            problems.append("it was not refused")
        return problems
    if outcome.answered > outcome.forwarded:
        problems.append(f"{outcome.answered} answers of the gateway to {outcome.forwarded} requests")
    if len(outcome.served) > outcome.forwarded:
        problems.append(f"{len(outcome.served)} requests at the engine, and {outcome.forwarded} were sent")
    return problems


def second_opinion(raw: bytes) -> str:
    """Return the number of requests that h11 finds in the bytes, with an exclamation mark if an error follows."""
    count = 0
    connection = h11.Connection(h11.SERVER, max_incomplete_event_size=1 << 20)
    connection.receive_data(raw)
    try:
        while not isinstance(event := connection.next_event(), type(h11.NEED_DATA)) and event is not h11.PAUSED:
            if isinstance(event, h11.EndOfMessage):
                count += 1
                connection.send(h11.Response(status_code=200, headers=[("Content-Length", "0")]))
                connection.send(h11.EndOfMessage())
                if connection.our_state is not h11.DONE:
                    break
                connection.start_next_cycle()
    except h11.ProtocolError:
        return f"{count}!"
    return str(count)


async def main(names: Sequence[str]) -> int:
    payloads = [payload for payload in PAYLOADS if not names or any(name in payload.name for name in names)]
    problems: list[str] = []
    async with AsyncExitStack() as stack:
        engine = await stack.enter_async_context(CannedEngine("both", echo))
        options = ("--connector", "plain", "--decode", engine.url)
        program = await stack.enter_async_context(gateway(*options, PROXY_RESUME__MODE="off"))
        port = int(program.url.rpartition(":")[2])
        slow_road = await stack.enter_async_context(
            gateway(*options, PROXY_RESUME__MODE="off", PROXY_LISTEN__FAST_PATH="false")
        )
        ways = [
            HttpListener(DIRECT, port),
            HttpListener(SECOND_REQUEST, port, first=request("first")),
            HttpListener(NO_FAST_PATH, int(slow_road.url.rpartition(":")[2])),
        ]
        for name in sorted(FRONTS.keys() - missing()):
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix=f"pdproxy-{name}-")))
            ways.append(await stack.enter_async_context(running(name, port, folder)))
        width = max(len(payload.name) for payload in payloads)
        print(f"{'':{width}}  {'h11':4} " + " ".join(f"{way.name:13}" for way in ways))
        for number, payload in enumerate(payloads):
            outcomes = [await try_out(payload, way, engine, number) for way in ways]
            cells = []
            for way, outcome in zip(ways, outcomes, strict=True):
                wrong = disagreements(payload, way.name, outcome)
                problems += [f"{payload.name}, {way.name}: {sentence}" for sentence in wrong]
                cells.append(f"{outcome} {'!!' * bool(wrong)}")
            print(
                f"{payload.name:{width}}  {second_opinion(payload.raw):4} "
                + " ".join(f"{cell:13}" for cell in cells).rstrip(),
                flush=True,
            )
    print(*problems, sep="\n")
    print(f"{len(payloads)} payloads on {len(ways)} ways: {len(problems)} disagreements")
    return 1 if problems else 0


if __name__ == "__main__":
    if absent := sorted(missing() - {"envoy"}):
        print(f"{', '.join(absent)} cannot be found: apt-get install nginx-light haproxy caddy", file=sys.stderr)
        sys.exit(3)
    sys.exit(asyncio.run(main(sys.argv[1:])))
