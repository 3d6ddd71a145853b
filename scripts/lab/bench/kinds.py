"""CPU time of other kinds of requests, compared with a chat of the same prompt and 16 tokens.

The gateways run on one core, and simulated engines (`pdproxy mock-engine`) and clients on another. Each round sends all
kinds in turn, a fraction of a second each, and compares figures of the same round. So a change of the machine's speed
affects all of them.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from statistics import median, quantiles
from typing import Any, Final

import uvloop

from lab.common.fleet import Fleet, Gateway
from lab.common.load import CHAT, Answer, connect, post
from lab.common.output import aligned
from lab.common.peers import ours
from lab.common.proc import cpu_seconds
from lab.common.processes import fetch

TOKENS: Final = 16
_STEP_MS: Final = "1"
"""Time between two tokens of an engine. Without it, the gateway would read several tokens at once."""
_CONNECTIONS: Final = 16
_RUNNING: Final = 4
"""Limit of running requests for the kind that waits in the queue."""
_REQUESTS: Final = 96
"""Requests of each kind in a round."""
_NUMBER: Final = b"000000"
_TEXT: Final = 'The "quick" brown fox jumps over the lazy dog.\n' * 8 + _NUMBER.decode()
"""The prompt. Its last word differs in each request, because gateways remember requests that broke an engine."""
_LOST: Final = "loses its decoder"
"""The member `user` of requests whose decoder resets the connection after half of the tokens."""
_ALONE: Final = "chat, one at a time"
_FEW: Final = f"chat, {_RUNNING} at a time"
_DEFAULT, _RESUMING, _WAITING, _AIOHTTP, _SGLANG = "default", "resuming", "waiting", "aiohttp", "sglang"
_SETTINGS: Final[Mapping[str, Mapping[str, str]]] = {
    _DEFAULT: {},
    _RESUMING: {"HEALTH__EJECT_AFTER": "1000000", "RESUME__REPEAT_UP_TO_TOKENS": "0"},
    _WAITING: {"ADMISSION__MAX_RUNNING_DECODE": str(_RUNNING)},
    _AIOHTTP: {"LISTEN__FAST_PATH": "false"},
    _SGLANG: {"CONNECTOR": "sglang_bootstrap"},
}
"""Environment variables of each gateway."""


@dataclass(frozen=True, slots=True, eq=False)
class Kind:
    """One kind of request, in one form."""

    title: str
    stream: bool
    gateway: str = _DEFAULT
    path: str = CHAT
    prompt: str = "messages"
    """The member that has the prompt."""
    fields: Mapping[str, Any] = field(default_factory=lambda: {"max_tokens": TOKENS})
    connections: int = _CONNECTIONS
    beside: tuple[str, int] = ("chat", 1)
    """The base: a kind to compare with, and the number of its requests."""

    @property
    def requests(self) -> int:
        """Number of requests in a round."""
        return _REQUESTS if self.connections > 1 else _REQUESTS // 4

    def request(self, port: int) -> bytes:
        """Return head and body, with `_NUMBER` in the prompt."""
        prompt: Any = [{"role": "user", "content": _TEXT}] if self.prompt == "messages" else _TEXT
        body = {"model": "sim", self.prompt: prompt, "stream": self.stream, **self.fields}
        if self.path == "/generate":
            del body["model"]
        return post(port, body, self.path)


def kinds() -> list[Kind]:
    """Return all kinds, each behind its base."""
    generate = {"sampling_params": {"max_new_tokens": TOKENS}}
    two = {"max_tokens": TOKENS, "n": 2}
    lost = {"max_tokens": TOKENS, "user": _LOST}
    return [
        kind
        for stream in (True, False)
        for kind in (
            Kind("chat", stream),
            Kind("/v1/completions", stream, path="/v1/completions", prompt="prompt"),
            Kind("/v1/messages", stream, path="/v1/messages"),
            Kind("/v1/responses", stream, path="/v1/responses", prompt="input", fields={"max_output_tokens": TOKENS}),
            Kind("chat with n = 2", stream, fields=two),
            Kind(_FEW, stream, _WAITING, connections=_RUNNING, beside=(_FEW, 1)),
            Kind("chat that waited in the queue", stream, _WAITING, beside=(_FEW, 1)),
            Kind("chat with listen.fast_path: false", stream, _AIOHTTP),
            Kind(_ALONE, stream, _RESUMING, connections=1, beside=(_ALONE, 1)),
            Kind("chat whose decoder is lost", stream, _RESUMING, fields=lost, connections=1, beside=(_ALONE, 2)),
            Kind("chat with SGLang", stream, _SGLANG),
            Kind("/generate", stream, _SGLANG, "/generate", "text", generate, beside=("chat with SGLang", 1)),
        )
    ]


class Figures:
    """CPU time in µs of one request, by kind and round."""

    def __init__(self) -> None:
        self._taken: dict[Kind, list[float]] = {}

    def add(self, kind: Kind, microseconds: float) -> None:
        self._taken.setdefault(kind, []).append(microseconds)

    def table(self) -> str:
        """Return a line for each kind: µs, and the multiple of its base with the middle half of the rounds."""
        rows: list[tuple[str, ...]] = [("", "streamed, µs", "", "not streamed, µs", "", "compared with")]
        for title in dict.fromkeys(kind.title for kind in self._taken):
            forms = [kind for kind in self._taken if kind.title == title]
            cells = [cell for kind in forms for cell in (f"{median(self._taken[kind]):.0f}", self._ratio(kind))]
            base, times = forms[0].beside
            rows.append((title, *cells, "" if title == base else f"{times} × {base}"))
        return aligned(rows)

    def ratios(self, kind: Kind) -> list[float]:
        """Return the ratio to the base in each round."""
        base, times = kind.beside
        (other,) = (each for each in self._taken if (each.title, each.stream) == (base, kind.stream))
        return [own / (times * of) for own, of in zip(self._taken[kind], self._taken[other], strict=True)]

    def _ratio(self, kind: Kind) -> str:
        if kind.title == kind.beside[0]:
            return ""
        found = self.ratios(kind)
        low, _, high = quantiles(found, n=4) if len(found) > 1 else found * 3
        return f"× {median(found):.2f} ({low:.2f} to {high:.2f})"


class _Site:
    """Engines and gateways. All gateways share a core."""

    def __init__(self, vllm: Fleet, sglang: Fleet, package: Path | None) -> None:
        cores = sorted(os.sched_getaffinity(0))
        if len(cores) < 2:
            sys.exit("--kinds needs two cores: one for the gateways, one for the engines and the clients")
        os.sched_setaffinity(0, cores[1:])
        vllm.mock_engine("prefill")
        self._decoder = vllm.mock_engine("decode", "--decode-step-ms", _STEP_MS)
        sglang.mock_engine("prefill", "--profile", "sglang", bootstrap=True)
        sglang.mock_engine("decode", "--profile", "sglang", "--decode-step-ms", _STEP_MS)
        words = ("taskset", "-c", str(cores[0]), *ours(package).words)
        self._gateways: dict[str, Gateway] = {}
        for name, settings in _SETTINGS.items():
            fleet = sglang if name == _SGLANG else vllm
            variables = {f"PROXY_{variable}": value for variable, value in settings.items()}
            self._gateways[name] = fleet.keep(fleet.gateway(environment=variables, words=words))
        self._numbers = count()

    def lose_decoders(self) -> None:
        """Have the decoder reset the connection of each second request that asks for it: the first attempt."""
        rule = {"action": "reset_after_tokens", "tokens": TOKENS // 2, "user": _LOST, "every": 2, "skip": -1}
        fetch(f"{self._decoder.url}/_mock/faults", json.dumps(rule).encode())

    async def microseconds(self, kind: Kind) -> float:
        """Return the gateway's CPU time for a request of this kind, in µs."""
        gateway = self._gateways[kind.gateway]
        request = kind.request(gateway.port)
        before = cpu_seconds(gateway.pid)
        share = kind.requests // kind.connections
        await asyncio.gather(*(self._client(gateway.port, kind, request, share) for _ in range(kind.connections)))
        return 1e6 * (cpu_seconds(gateway.pid) - before) / kind.requests

    async def _client(self, port: int, kind: Kind, request: bytes, times: int) -> None:
        client = await connect(port)
        for _ in range(times):
            answer = await client.ask(request.replace(_NUMBER, b"%06d" % next(self._numbers)))
            if wrong := problem(kind, answer):
                sys.exit(f"{kind.title}, {'streamed' if kind.stream else 'not streamed'}: {wrong}")
        client.transport.close()

    def problems(self, rounds: int) -> Iterator[str]:
        """Yield events that should have been measured and did not happen."""
        lost = 2 * rounds * (_REQUESTS // 4)
        waited = 2 * rounds * _REQUESTS
        for name, gateway, least in (("resumes_total", _RESUMING, lost), ("queue_waits_total", _WAITING, waited / 2)):
            found = self._gateways[gateway].figure(name)
            if found < least:
                yield f"pdproxy_{name} is {found:g}, and not at least {least:g}"


def problem(kind: Kind, answer: Answer) -> str | None:
    """Return the fault of an answer, or None."""
    if answer.status != 200 or not answer.is_whole:
        return f"status {answer.status}: {answer.body[:300].decode(errors='replace')}"
    if b'"error":{' in answer.body:
        return f"an error in the answer: {answer.body[-300:].decode(errors='replace')}"
    return None if not kind.stream or answer.body.count(b"data: ") > TOKENS // 2 else "hardly any events"


async def _measure(site: _Site, figures: Figures, chosen: Sequence[Kind], rounds: int) -> None:
    for number in range(rounds + 1):
        for kind in chosen:
            microseconds = await site.microseconds(kind)
            if number:  # the first round warms up
                figures.add(kind, microseconds)
        print(f"round {number} of {rounds}", file=sys.stderr, flush=True)


def compare(rounds: int, package: Path | None) -> None:
    """Measure all kinds and print the table.

    `package`: directory of the gateway, or None for the project's.
    """
    figures = Figures()
    with Fleet() as vllm, Fleet() as sglang:
        site = _Site(vllm, sglang, package)
        site.lose_decoders()
        uvloop.run(_measure(site, figures, kinds(), rounds))
        problems = list(site.problems(rounds))
    print(f"CPU of the gateway for a request of {TOKENS} tokens, median of {rounds} rounds (middle half).\n")
    print(figures.table())
    if problems:
        sys.exit("\n".join(problems))
