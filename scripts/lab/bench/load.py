"""Run one scenario and check every answer: status, number of tokens, finish reason, usage and end of the stream.

Usage: `python -m lab.bench.load PORT SCENARIO SECONDS [directly]`; prints a Result as JSON. It shares the machine with
the measured program.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
from collections import Counter
from dataclasses import asdict, dataclass, field
from time import perf_counter

import orjson
import uvloop

from lab.bench.scenarios import Scenario, named
from lab.common.engines import ENGINE_ID, WORD
from lab.common.load import Answer, Client, Histogram, connect, post

_CONTENT = f'"content":"{WORD}'.encode()
PATIENCE_SECONDS = 30.0
"""An answer that takes this much longer than the scenario is an error."""


@dataclass(slots=True)
class Result:
    """The result of one measurement."""

    completed: int = 0
    tokens: int = 0
    seconds: float = 0.0
    open_at_once: int = 0
    beside: int = 0
    """Answers to the clients of `Scenario.beside`."""
    first_tokens: dict[int, int] = field(default_factory=dict)
    """Times to the first token: the counts of a histogram."""
    gaps: dict[int, int] = field(default_factory=dict)
    """Times between two arrivals of tokens: the counts of a histogram."""
    errors: dict[str, int] = field(default_factory=dict)

    @classmethod
    def from_json(cls, text: str) -> Result:
        """Read a Result. JSON has strings as keys instead of numbers."""
        fields = json.loads(text)
        for name in ("first_tokens", "gaps"):
            fields[name] = {int(bucket): count for bucket, count in fields[name].items()}
        return cls(**fields)


class Load:
    """One scenario against one port. Fills `result`."""

    def __init__(self, scenario: Scenario, port: int, *, directly: bool) -> None:
        self.result = Result()
        self._scenario = scenario
        self._port = port
        self._request = http_request(scenario, port, directly=directly)
        self._ended = asyncio.Event()
        self._open = 0
        self._errors: Counter[str] = Counter()
        self._first_tokens = Histogram(self.result.first_tokens)
        self._gaps = Histogram(self.result.gaps)

    def end(self) -> None:
        """Stop sending requests."""
        self._ended.set()

    async def run(self, *, until_ended: bool = False) -> None:
        """Run for the scenario's time, or until `end`, and wait for all answers."""
        began = perf_counter()
        # Streams begin at different times, which are the same in each run.
        draw = random.Random(0)
        delays = [self._scenario.spread_seconds * draw.random() for _ in range(self._scenario.connections)]
        tasks = [asyncio.create_task(self._client(delay)) for delay in delays]
        if not until_ended:
            asyncio.get_running_loop().call_later(self._scenario.seconds, self.end)
        await self._ended.wait()
        _, late = await asyncio.wait(tasks, timeout=PATIENCE_SECONDS)
        self._errors["not answered in time"] += len(late)
        self.result.seconds = perf_counter() - began
        self.result.errors = dict(+self._errors)

    async def _client(self, delay: float) -> None:
        await asyncio.sleep(delay)
        client: Client | None = None
        while True:
            self._open += 1
            self.result.open_at_once = max(self.result.open_at_once, self._open)
            sent_at = perf_counter()
            try:
                if client is None or client.closed:
                    client = await connect(self._port, self._gaps)
                    sent_at = perf_counter()
                self._take(await client.ask(self._request))
            except OSError as error:
                self._errors[str(error)] += 1
                await asyncio.sleep(0.01)
            finally:
                self._open -= 1
            if self._scenario.spread_seconds or self._ended.is_set():
                break
            if self._scenario.rest_seconds:
                await asyncio.sleep(sent_at + self._scenario.rest_seconds - perf_counter())
        if client is not None:
            client.transport.close()

    def _take(self, answer: Answer) -> None:
        wrong = problem(self._scenario, answer)
        if wrong is not None:
            self._errors[wrong] += 1
            return
        self.result.completed += 1
        self.result.tokens += self._scenario.max_tokens
        if answer.first_token_at is not None:
            self._first_tokens.add(answer.first_token_at - answer.sent_at)


def http_request(scenario: Scenario, port: int, *, directly: bool) -> bytes:
    """Return a client's request. `directly`: for a decoder, as if a prefiller had computed the prompt."""
    kv_params = {"kv_transfer_params": {"do_remote_prefill": True, "remote_engine_id": ENGINE_ID}} if directly else {}
    body = scenario.body(**kv_params)
    return post(port, body)


def problem(scenario: Scenario, answer: Answer) -> str | None:
    """Return the fault of an answer, or None."""
    if not answer.is_whole:
        return "the connection was closed before the end of the answer"
    if answer.status != 200:
        return f"status {answer.status}"
    return _stream_problem(scenario, answer.body) if scenario.stream else _answer_problem(scenario, answer.body)


def _answer_problem(scenario: Scenario, body: bytes) -> str | None:
    answer = orjson.loads(body)
    if answer["choices"][0]["message"]["content"] != WORD * scenario.max_tokens:
        return "wrong text"
    return None if answer["usage"]["completion_tokens"] == scenario.max_tokens else "wrong usage"


def _stream_problem(scenario: Scenario, body: bytes) -> str | None:
    if not body.endswith(b"data: [DONE]\n\n"):
        return "no [DONE]"
    if body.count(_CONTENT) != scenario.max_tokens:
        return "wrong number of tokens"
    if b'"finish_reason":"length"' not in body.replace(b": ", b":"):
        return "no finish reason"
    *_, usage, _, _ = body.split(b"\n\n")
    return None if orjson.loads(usage[6:])["usage"]["completion_tokens"] == scenario.max_tokens else "wrong usage"


async def _run(scenario: Scenario, port: int, *, directly: bool) -> Result:
    """Run the scenario, and the clients beside it."""
    load = Load(scenario, port, directly=directly)
    if scenario.beside is None:
        await load.run()
        return load.result
    other = Load(scenario.beside, port, directly=directly)
    others = asyncio.create_task(other.run(until_ended=True))
    await load.run()
    other.end()
    await others
    load.result.beside = other.result.completed
    load.result.errors = dict(Counter(load.result.errors) + Counter(other.result.errors))
    return load.result


def main(port: int, name: str, seconds: float, *, directly: bool) -> None:
    """Run one scenario and print its Result."""
    result = uvloop.run(_run(named(name, seconds), port, directly=directly))
    json.dump(asdict(result), sys.stdout)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], float(sys.argv[3]), directly=sys.argv[4:] == ["directly"])
