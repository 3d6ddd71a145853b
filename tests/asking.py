"""Clients that send requests to the gateway or to an engine, and read the answers to their ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import aiohttp
import orjson

from proxy.sim.engine import SimulatedEngine
from proxy.wire.openai import Api


async def until(condition: Callable[[], object], what: str, timeout_seconds: float = 100.0) -> None:
    """Let the event loop turn until a condition holds."""
    try:
        async with asyncio.timeout(timeout_seconds):
            while not condition():  # noqa: ASYNC110 most conditions have no event
                await asyncio.sleep(0.001)
    except TimeoutError:
        raise AssertionError(f"waited in vain for {what}") from None


@dataclass(frozen=True)
class Answer:
    """An answer as its client saw it. `is_whole` is False if the connection was closed before the body's end."""

    status: int
    headers: dict[str, str]
    body: bytes
    is_whole: bool

    @property
    def json(self) -> Any:
        return orjson.loads(self.body)

    @property
    def events(self) -> list[Any]:
        """Data of a stream's events, parsed. `[DONE]` stays text."""
        lines = self.body.replace(b"\r\n", b"\n").split(b"\n\n")
        data = [line.removeprefix(b"data: ") for line in lines if line.startswith(b"data: ")]
        return ["[DONE]" if item == b"[DONE]" else orjson.loads(item) for item in data]

    @property
    def is_stream(self) -> bool:
        return self.headers.get("content-type", "").startswith("text/event-stream")

    @property
    def is_done(self) -> bool:
        """Whether it ended as a complete answer does."""
        return self.is_whole and (not self.is_stream or self.body.endswith(b"data: [DONE]\n\n"))

    @property
    def error(self) -> Any:
        """The error object: of the body, or of the last event."""
        if not self.is_stream:
            return self.json.get("error")
        last = self.events[-1]
        return last.get("error") if isinstance(last, dict) else None

    @property
    def texts(self) -> dict[int, str]:
        """The text of every choice by its index, however it was delivered."""
        texts: dict[int, str] = {}
        for payload in self.events if self.is_stream else [self.json]:
            for choice in payload["choices"] if isinstance(payload, dict) and "choices" in payload else ():
                message = choice.get("delta") or choice.get("message") or {}
                text = choice.get("text") or message.get("content") or ""
                texts[choice["index"]] = texts.get(choice["index"], "") + text
        return texts

    @property
    def text(self) -> str:
        """The text of the only choice."""
        texts = self.texts
        assert set(texts) <= {0}
        return texts.get(0, "")

    @property
    def usage(self) -> Any:
        """The answer's usage; None when there is none."""
        payloads = [event for event in self.events if isinstance(event, dict)] if self.is_stream else [self.json]
        return next((payload["usage"] for payload in reversed(payloads) if payload.get("usage")), None)


def request(api: Api, text: str | list[Any] = "Hello there", **fields: Any) -> dict[str, Any]:
    """Return a request body. `max_tokens` is 8 by default. A text in parts makes a chat."""
    prompt = {"messages": [{"role": "user", "content": text}]} if api is Api.CHAT else {"prompt": text}
    return {"model": "sim", **prompt, "max_tokens": 8, **fields}


def api_of(body: dict[str, Any]) -> Api:
    return Api.CHAT if "messages" in body else Api.COMPLETIONS


async def ask(session: aiohttp.ClientSession, url: str, body: dict[str, Any], **headers: str) -> Answer:
    """Send a request, and read its answer to the end or to the cut."""
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    async with session.post(url + api_of(body).path, data=orjson.dumps(body), headers=names) as response:
        return await read(response)


async def read(response: aiohttp.ClientResponse) -> Answer:
    """Read the answer of a response."""
    parts: list[bytes] = []
    is_whole = True
    try:
        async for part in response.content.iter_any():
            parts.append(part)  # noqa: PERF401 data before a cut counts
    except aiohttp.ClientPayloadError:
        is_whole = False
    headers = {name.lower(): value for name, value in response.headers.items()}
    return Answer(response.status, headers, b"".join(parts), is_whole)


_alone: dict[bytes, str] = {}


async def answer_alone(body: dict[str, Any]) -> str:
    """Return the text of a single engine for a request, without a gateway and a stream."""
    return (await answers_alone([body]))[0]


async def answers_alone(bodies: Iterable[dict[str, Any]]) -> list[str]:
    """Return the texts of a single engine for several requests."""
    whole = [
        {name: value for name, value in body.items() if name not in ("stream", "stream_options")} for body in bodies
    ]
    keys = [orjson.dumps(body) for body in whole]
    if not all(key in _alone for key in keys):
        async with SimulatedEngine() as engine, aiohttp.ClientSession() as session:
            for key, body in zip(keys, whole, strict=True):
                if key not in _alone:
                    _alone[key] = (await ask(session, engine.url, body)).text
    return [_alone[key] for key in keys]
