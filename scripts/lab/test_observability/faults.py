"""What a fault is, and where it happens."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lab.test_observability.traffic import Clients

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractAsyncContextManager

    from lab.test_observability.fleet import Fleet
    from proxy.sim.engine import SimulatedEngine


class Site:
    """The fleet, and who asks it."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self.clients = Clients(fleet.serving, fleet.session)
        self.others = Clients(fleet.idle, fleet.session)

    @property
    def prefill(self) -> list[SimulatedEngine]:
        return self.fleet.prefill

    @property
    def decode(self) -> list[SimulatedEngine]:
        return self.fleet.decode


@dataclass(frozen=True, slots=True)
class Fault:
    """`alerts` fire while it happens, and only then."""

    happens: Callable[[Site], AbstractAsyncContextManager[None]]
    alerts: tuple[str, ...]

    @property
    def name(self) -> str:
        return self.happens.__name__.replace("_", " ")


@contextmanager
def rule(engines: Sequence[SimulatedEngine], *actions: str, **fields: Any) -> Iterator[None]:
    """Engines misbehave like this."""
    for engine in engines:
        for action in actions:
            engine.faults.add(action, **fields)
    try:
        yield
    finally:
        for engine in engines:
            engine.faults.clear()
