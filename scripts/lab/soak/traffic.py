"""The clients: they compare every answer with that of a single engine.

Usage: `python -m lab.soak.traffic PORT,… SEED CLIENTS FILE`. Each line on standard input is a number of seconds to send
requests for. After the last answer a line is printed. Writes an Answer for every request to the file.
"""

from __future__ import annotations

import asyncio
import random
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any, BinaryIO

import orjson
import uvloop

from lab.common import load
from lab.common.load import DONE, Connections, Load, ask, post
from lab.soak.cluster import ENGINE_OPTIONS
from lab.soak.evidence import Answer, Outcome
from lab.soak.workload import Request, user_name, workload
from proxy.sim.engine import SimulatedEngine

_PATIENCE_SECONDS = 60.0
_CLEAN_PER_SECOND = 10.0


class Traffic:
    """All clients of one run. Writes the file of answers."""

    def __init__(self, ports: Sequence[int], seed: int, clients: int, answers: BinaryIO) -> None:
        self._gateways = [Connections(port) for port in ports]
        self._clients = clients
        self._answers = answers
        self._draw = random.Random(seed)
        *self._requests, self._clean = workload(seed)
        self._expected: dict[int, dict[str, Any]] = {}
        self._serials = count()

    async def learn(self) -> None:
        """Get the expected answers from an engine without a gateway."""
        async with SimulatedEngine(**ENGINE_OPTIONS) as engine:
            for request in (request for request in (*self._requests, self._clean) if request.status == 200):
                answer = await ask(engine.port, post(engine.port, request.body(""), request.api.path))
                expected = content(answer.body, stream=request.stream)
                if "stop" in request.fields:
                    # If an answer ends inside a stop string, tokens behind it may count, too.
                    expected["usage"] = None
                self._expected[request.number] = expected

    async def ask(self, seconds: float) -> None:
        """Send requests for a time, and wait for the last answer."""

        async def some(_: int) -> str:
            await self._one(self._draw.choice(self._requests))
            await asyncio.sleep(self._draw.uniform(0.0, 0.1))
            return ""

        async def clean(_: int) -> str:
            await self._one(self._clean, is_clean=True)
            return ""

        # Clean requests are sent at a rate, so that a slow gateway gets as many.
        async with Load(some).at_a_time(self._clients), Load(clean).at_rate(_CLEAN_PER_SECOND):
            await asyncio.sleep(seconds)

    async def _one(self, request: Request, *, is_clean: bool = False) -> None:
        serial = next(self._serials)
        user = user_name(serial, request)
        gateway = self._gateways[serial % len(self._gateways)]
        # Some clients use a new connection each time, which any worker may accept.
        headers = {"X_Request_Id": user, **({"Connection": "close"} if serial % 3 == 0 else {})}
        request_bytes = post(gateway.port, request.body(user), request.api.path, **headers)
        received: load.Answer | None = None
        leaves_after = request.leaves_after_seconds
        began = time.time()
        try:
            async with asyncio.timeout(_PATIENCE_SECONDS if leaves_after is None else leaves_after):
                received = await gateway.ask(request_bytes)
        except TimeoutError:
            outcome, problem = Outcome.SILENT if leaves_after is None else Outcome.LEFT, ""
        except OSError as error:
            outcome, problem = Outcome.CUT, f"{type(error).__name__}: {error}"
        else:
            outcome, problem = self._judged(request, received)
        body = received.body if received is not None else b""
        answer = Answer(
            id=user,
            began=began,
            ended=time.time(),
            api=request.api.value,
            stream=request.stream,
            units=request.units,
            asks_usage=request.asks_usage,
            is_clean=is_clean,
            status=received.status if received is not None else None,
            outcome=outcome,
            problem=problem,
            is_done=body.rstrip().endswith(DONE),
            has_usage=request.stream and _has_usage(body),
        )
        self._answers.write(orjson.dumps(answer) + b"\n")

    def _judged(self, request: Request, received: load.Answer) -> tuple[Outcome, str]:
        """Return the outcome of a request whose answer has ended."""
        if not received.is_whole:
            return Outcome.CUT, "the connection was closed before the end of the answer"
        if received.status != request.status:
            return Outcome.ERROR, f"status {received.status}: {_error(received.body)}"
        if request.status != 200:
            return Outcome.REFUSED, ""
        try:
            if error := _error_event(received.body):
                return Outcome.ERROR, f"event: {error}"
            problem = difference(content(received.body, stream=request.stream), self._expected[request.number])
        except Unreadable as unreadable:
            problem = str(unreadable)
        if request.stream and not received.body.rstrip().endswith(DONE):
            problem = problem or "the stream ends without [DONE]"
        return (Outcome.WRONG, problem) if problem else (Outcome.COMPLETE, "")


def _has_usage(body: bytes) -> bool:
    with suppress(Unreadable):
        return any(payload.get("usage") for payload in payloads(body))
    return False


def _error_event(body: bytes) -> str:
    """Return the error event of a stream, or an empty string."""
    return _error(body.rpartition(b"data: ")[2]) if b'"error":' in body else ""


def _error(body: bytes) -> str:
    """Return code and message of an error body in one line."""
    try:
        error = orjson.loads(body)["error"]
        return f"{error.get('code')}: {error.get('message')}"
    except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError):
        return str(body[:100])


# The content of an answer, streamed or not, in one form that can be compared.


class Unreadable(Exception):
    """An answer cannot be read. The text is the reason."""


def payloads(body: bytes) -> list[dict[str, Any]]:
    """Return the JSON of a stream's events without `[DONE]`. Raises Unreadable."""
    events = [event for event in body.replace(b"\r\n", b"\n").split(b"\n\n") if event.startswith(b"data: ")]
    if events and events[-1] == DONE:
        events.pop()
    return [_json(event.removeprefix(b"data: ")) for event in events]


def content(body: bytes, *, stream: bool) -> dict[str, Any]:
    """Return reasoning, text, tool calls, token ids and end of each choice, and the usage. Raises Unreadable."""
    parts = payloads(body) if stream else [_json(body)]
    try:
        usages = [part["usage"] for part in parts if part.get("usage") and not (stream and part["choices"])]
        choices = [choice for part in parts for choice in part["choices"]]
        return {
            "choices": {
                index: _choice([choice for choice in choices if choice["index"] == index])
                for index in sorted({choice["index"] for choice in choices})
            },
            "usage": [{name: usage[name] for name in ("prompt_tokens", "completion_tokens")} for usage in usages],
        }
    except (KeyError, TypeError) as error:
        raise Unreadable(f"the answer has another shape: {error!r}") from None


def difference(answer: dict[str, Any], expected: dict[str, Any]) -> str:
    """Return the first difference, or an empty string. Usage is compared if both answers have it."""
    if answer["usage"] and expected["usage"] and answer["usage"] != expected["usage"]:
        return f"usage is {answer['usage']}, not {expected['usage']}"
    if answer["choices"].keys() != expected["choices"].keys():
        return f"there are choices {sorted(answer['choices'])}, not {sorted(expected['choices'])}"
    for index, choice in expected["choices"].items():
        for name, value in choice.items():
            got = answer["choices"][index][name]
            if got != value:
                return f"{name} of choice {index} is {_shortened(got, value)}"
    return ""


def _shortened(got: Any, value: Any) -> str:
    """Return the first difference of two values with some context."""
    ours, theirs = str(got), str(value)
    at = next((at for at, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs)))
    begin = max(0, at - 20)
    return f"…{ours[begin : at + 20]!r} at {at} of {len(ours)}, not …{theirs[begin : at + 20]!r} of {len(theirs)}"


def _choice(parts: list[dict[str, Any]]) -> dict[str, Any]:
    messages = [part.get("delta") or part.get("message") or {} for part in parts]
    return {
        "reasoning": "".join(message.get("reasoning") or "" for message in messages),
        "text": "".join(message.get("content") or "" for message in messages)
        + "".join(part.get("text") or "" for part in parts),
        "tool_calls": _tool_calls(messages),
        "token_ids": [token for part in parts for token in part.get("token_ids") or ()],
        "finish": [part["finish_reason"] for part in parts if part.get("finish_reason")],
    }


def _tool_calls(messages: list[dict[str, Any]]) -> list[list[str]]:
    """Return name and arguments of each tool call."""
    calls: list[list[str]] = []
    for number, part in ((n, part) for message in messages for n, part in enumerate(message.get("tool_calls") or ())):
        function = part.get("function") or {}
        index = part.get("index", number)
        if index == len(calls):
            calls.append([function.get("name") or "", ""])
        calls[index][1] += function.get("arguments") or ""
    return calls


def _json(data: bytes) -> dict[str, Any]:
    try:
        value = orjson.loads(data)
    except orjson.JSONDecodeError:
        raise Unreadable(f"not JSON: {data[:80]!r}") from None
    if not isinstance(value, dict):
        raise Unreadable(f"not a JSON object: {data[:80]!r}")
    return value


async def main(ports: Sequence[int], seed: int, clients: int, path: Path) -> None:
    """Serve the commands on standard input until it ends."""
    loop = asyncio.get_running_loop()
    with path.open("wb") as answers:
        traffic = Traffic(ports, seed, clients, answers)
        await traffic.learn()
        print("ready", flush=True)
        while line := await loop.run_in_executor(None, sys.stdin.readline):
            await traffic.ask(float(line))
            answers.flush()
            print("rest", flush=True)


if __name__ == "__main__":
    uvloop.run(
        main([int(port) for port in sys.argv[1].split(",")], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
    )
