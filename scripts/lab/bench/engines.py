"""Prefillers and decoders that cost next to nothing: `python -m lab.bench.engines PREFILL_PORTS DECODE_PORTS`, and
`without-ids` for engines that know no token ids.

Raw asyncio on uvloop, one process for all, answers built beforehand. They speak the pull protocol as far as a proxy can
get it wrong: a prefiller insists on `do_remote_decode` and one token, a decoder on the prefiller's parameters. And they
speak SGLang's, in which both get the same request with a `bootstrap_room`, at the same time, and neither answers before
the other has it, too.

A stream has the shape of vLLM's, write by write: the headers at once, then the role chunk with the first token, then a
token per write, with token ids if the request asks for them. And as in a real engine all streams of a decoder get their
token in the same step; the decoders do not step together. Nothing steps once a second: streams that slow have their own
clock each.
"""

from __future__ import annotations

import asyncio
import sys
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, Final, cast

import httptools
import orjson
import uvloop

from lab.bench import answers
from lab.bench.scenarios import FIRST_TOKEN_SECONDS, MEBIBYTE, MODEL, TEXT_BYTES_PER_TOKEN

if TYPE_CHECKING:
    from collections.abc import Callable

_LONGEST_STEP_SECONDS = 0.5
_IMAGE_TOKENS = 2000
_WAITING: Final[dict[int, Callable[[], object]]] = {}
"""What an engine does when its partner is there, by the room."""


def _meet(room: int, go_on: Callable[[], object]) -> None:
    partner = _WAITING.pop(room, None)
    if partner is None:
        _WAITING[room] = go_on
    else:
        partner()
        go_on()


class _Engine(asyncio.Protocol):
    """One connection. `phase`: when the steps of a decoder begin, as a share of a step."""

    def __init__(self, answer: Callable[[_Engine, dict[str, Any]], None], phase: float, *, knows_ids: bool) -> None:
        self._answer = answer
        self._knows_ids = knows_ids
        self._phase = phase
        self._parser = httptools.HttpRequestParser(self)
        self._body: list[bytes] = []
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.Handle | None = None
        self._role = b""
        self._tells_ids = False
        self._pace_seconds = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is not a subclass

    def connection_lost(self, error: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:  # a router looks whether gRPC is spoken here
            self._transport.close()

    def on_body(self, data: bytes) -> None:
        self._body.append(data)

    def on_message_complete(self) -> None:
        if self._parser.get_method() == b"GET":
            self._transport.write(answers.HEALTHY)
            return
        body, tokens = without_image(b"".join(self._body))
        self._body.clear()
        request = orjson.loads(body)
        self._tells_ids = self._knows_ids and bool(request.get("return_token_ids"))
        self._role = answers.role(tokens if self._tells_ids else None)
        self._pace_seconds = _pace_seconds(request["model"])
        self._answer(self, request)

    def prefill(self, request: dict[str, Any]) -> None:
        """The answer of a prefiller."""
        if "bootstrap_room" in request:
            _meet(
                request["bootstrap_room"],
                partial(self._transport.write, answers.BOOTSTRAPPED[bool(request.get("stream"))]),
            )
            return
        wanted = request.get("kv_transfer_params") or {}
        fits = wanted.get("do_remote_decode") is True and request.get("max_tokens") == 1 and not request.get("stream")
        self._transport.write(answers.PREFILLED if fits else answers.NO_PREFILL)

    def decode(self, request: dict[str, Any]) -> None:
        """The answer of a decoder."""
        given = request.get("kv_transfer_params") or {}
        if given.get("remote_engine_id") != answers.ENGINE_ID and not isinstance(request.get("bootstrap_room"), int):
            self._transport.write(answers.NO_KV)
            return
        room = request.get("bootstrap_room")
        if room is None:
            self._answer_as_decoder(request)
        else:
            _meet(room, partial(self._answer_as_decoder, request))

    def _answer_as_decoder(self, request: dict[str, Any]) -> None:
        tokens = request.get("max_tokens") or request["max_completion_tokens"]
        if request.get("stream"):
            self._transport.write(answers.STREAM_HEAD)
            self._timer = self._loop.call_later(FIRST_TOKEN_SECONDS, self._first_token, tokens)
        else:
            self._timer = self._loop.call_later(FIRST_TOKEN_SECONDS, self._transport.write, answers.completion(tokens))

    def _first_token(self, tokens: int) -> None:
        if tokens == 1:
            self._transport.write(self._role + answers.end(tokens, self._tells_ids))
            return
        self._transport.write(self._role + answers.TOKENS[self._tells_ids])
        if self._pace_seconds > _LONGEST_STEP_SECONDS:
            self._phase = self._loop.time() / self._pace_seconds % 1
        step = int(self._loop.time() / self._pace_seconds - self._phase) if self._pace_seconds else 0
        self._wait_for_step(step + 1, tokens - 1, tokens)

    def _wait_for_step(self, step: int, left: int, tokens: int) -> None:
        if not self._pace_seconds:
            self._timer = self._loop.call_soon(self._step, step, left, tokens)
            return
        # By number and not from now on, so that a late timer does not make the stream slower.
        due = (self._phase + step) * self._pace_seconds
        self._timer = self._loop.call_at(due, self._step, step, left, tokens)

    def _step(self, step: int, left: int, tokens: int) -> None:
        if left == 1:
            self._transport.write(answers.end(tokens, self._tells_ids))
        else:
            self._transport.write(answers.TOKENS[self._tells_ids])
            self._wait_for_step(step + 1, left - 1, tokens)


def without_image(body: bytes) -> tuple[bytes, int]:
    """A body to read, and the number of its prompt's tokens. Nothing reads megabytes of base64 here."""
    if len(body) < MEBIBYTE:
        return body, len(body) // TEXT_BYTES_PER_TOKEN
    begin = body.index(b'"data:') + 1
    rest = body[:begin] + body[body.index(b'"', begin) :]
    return rest, len(rest) // TEXT_BYTES_PER_TOKEN + _IMAGE_TOKENS


@lru_cache
def _pace_seconds(model: str) -> float:
    return int(model.removeprefix(f"{MODEL}-").removesuffix("ms")) / 1000


async def _serve(prefill_ports: list[int], decode_ports: list[int], *, knows_ids: bool) -> None:
    loop = asyncio.get_running_loop()
    for ports, answer in ((prefill_ports, _Engine.prefill), (decode_ports, _Engine.decode)):
        for index, port in enumerate(ports):
            make = partial(_Engine, answer, index / len(ports), knows_ids=knows_ids)
            await loop.create_server(make, "127.0.0.1", port, backlog=4096)
    # Whoever started this process holds the other end: its end, however it comes, is the end here, too.
    await loop.run_in_executor(None, sys.stdin.buffer.read)


if __name__ == "__main__":
    prefill, decode = ([int(port) for port in argument.split(",")] for argument in sys.argv[1:3])
    uvloop.run(_serve(prefill, decode, knows_ids=sys.argv[3:] != ["without-ids"]))
