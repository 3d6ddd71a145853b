"""Asks for one scenario: `python -m lab.bench.load PORT SCENARIO SECONDS [directly]`; prints a Result as JSON.

Raw asyncio on uvloop, because it shares the machine with what it measures. `lab.bench.client` checks every answer.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
from collections import Counter
from dataclasses import asdict, dataclass, field
from functools import partial
from time import perf_counter

import uvloop

from lab.bench.client import Client, http_request, problem
from lab.bench.histogram import Histogram
from lab.bench.scenarios import Scenario, scenarios

PATIENCE_SECONDS = 30.0
"""What is not answered so long after the scenario's own time is an error."""


@dataclass(slots=True)
class Result:
    """What came of one measurement."""

    completed: int = 0
    tokens: int = 0
    seconds: float = 0.0
    open_at_once: int = 0
    beside: int = 0
    """Answers to those who ask beside the scenario."""
    first_tokens: dict[int, int] = field(default_factory=dict)
    """Times to the first token: the counts of a histogram."""
    gaps: dict[int, int] = field(default_factory=dict)
    """Times between two arrivals of tokens: the counts of a histogram."""
    errors: dict[str, int] = field(default_factory=dict)

    @classmethod
    def from_json(cls, text: str) -> Result:
        """JSON has no numbers as keys."""
        fields = json.loads(text)
        for name in ("first_tokens", "gaps"):
            fields[name] = {int(bucket): count for bucket, count in fields[name].items()}
        return cls(**fields)


class Load:
    """One scenario against one port. Owns the Result."""

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
        """No further requests."""
        self._ended.set()

    async def run(self, *, until_ended: bool = False) -> None:
        """For the scenario's time or until it is ended, and until everybody has an answer."""
        began = perf_counter()
        # Spread, as streams do not begin all at once; always the same way.
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
        loop = asyncio.get_running_loop()
        client: Client | None = None
        while True:
            self._open += 1
            self.result.open_at_once = max(self.result.open_at_once, self._open)
            sent_at = perf_counter()
            try:
                if client is None or client.closed:
                    _, client = await loop.create_connection(partial(Client, self._gaps), "127.0.0.1", self._port)
                    sent_at = perf_counter()
                self._take(client, sent_at, *await client.ask(self._request))
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

    def _take(self, client: Client, sent_at: float, status: int, body: bytes) -> None:
        wrong = problem(self._scenario, status, body)
        if wrong is not None:
            self._errors[wrong] += 1
            return
        self.result.completed += 1
        self.result.tokens += self._scenario.max_tokens
        if client.first_token_at is not None:
            self._first_tokens.add(client.first_token_at - sent_at)


async def _ask(scenario: Scenario, port: int, *, directly: bool) -> Result:
    """The scenario, and what others do beside it."""
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
    """Run one scenario and print what came of it."""
    (scenario,) = (scenario for scenario in scenarios(seconds) if scenario.name == name)
    result = uvloop.run(_ask(scenario, port, directly=directly))
    json.dump(asdict(result), sys.stdout)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], float(sys.argv[3]), directly=sys.argv[4:] == ["directly"])
