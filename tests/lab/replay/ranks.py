"""Prefillers with several engines behind one address, like data-parallel ranks."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from lab.replay.engines import Engine
from lab.replay.fleet import Fleet
from proxy.balancer.engines import EngineFacts
from proxy.common.backend import Role
from proxy.sim.hardware.work import Work

RANKS = 4


class Ranks:
    """A prefiller with several ranks. A prompt goes to the rank with the fewest, or to a random one if `is_blind`."""

    def __init__(self, engines: Sequence[Engine], *, is_blind: bool) -> None:
        self._engines = engines
        self._blindly = random.Random(3) if is_blind else None
        self._places: dict[Work, Engine] = {}

    @property
    def batch(self) -> Any:
        """The batch that figures read."""
        return SimpleNamespace(busy_seconds=sum(engine.batch.busy_seconds for engine in self._engines))

    async def prefill(self, prompt_tokens: int, names: Sequence[int], kept_tokens: int = 0) -> Work:
        if self._blindly is not None:
            engine = self._blindly.choice(self._engines)
        else:
            engine = min(self._engines, key=lambda each: each.batch.running + each.batch.waiting)
        work = await engine.prefill(prompt_tokens, names, kept_tokens)
        self._places[work] = engine
        return work

    def give_back(self, work: Work) -> None:
        self._places.pop(work).give_back(work)


@dataclass(frozen=True, slots=True)
class FleetOfRanks(Fleet):
    """A fleet whose prefillers have several ranks."""

    tells_ranks: bool = False
    is_blind: bool = False

    @property
    def prefiller_facts(self) -> EngineFacts:
        return EngineFacts(data_parallel_ranks=RANKS if self.tells_ranks else None)

    def engines(self, role: Role) -> Iterator[Any]:
        if role is Role.DECODE:
            yield from Fleet.engines(self, role)
            return
        machine = self.prefill_machine
        for _ in range(self.prefillers):
            engines = [Engine(machine.cost, machine.prefill, 0.0) for _ in range(RANKS)]
            yield Ranks(engines, is_blind=self.is_blind)
