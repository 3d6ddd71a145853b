"""How the sources of discovery are: known to all workers, written by the one that watches them.

What a source names is in the roster; here is whether it can be asked. Build it before forking.
"""

from __future__ import annotations

import time
from dataclasses import astuple, dataclass, replace
from typing import TYPE_CHECKING, Final

from proxy.balancer.shared.memory import SharedValue

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

_CAPACITY_BYTES: Final = 2 * 1024 * 1024  # some 250 sources whose names are paths of the greatest length
_MAX_PROBLEM: Final = 400


@dataclass(frozen=True, slots=True)
class SourceState:
    """Of one source since the gateway began, or since the source was configured if that was later."""

    told_at: float | None = None
    """When it last said which instances there are, in seconds since the epoch; None: not yet."""
    failures: int = 0
    """How often it could not be asked, or said what cannot be."""
    problem: str | None = None
    """What is wrong now; None: nothing, or it was not asked yet."""


class SourceStates:
    """By origin. Reading costs a look at the version as long as nothing has changed."""

    def __init__(self) -> None:
        self._shared = SharedValue("list of sources", _CAPACITY_BYTES)
        self._read_version = 0
        self._states: dict[str, SourceState] = {}

    def all(self) -> Mapping[str, SourceState]:
        """The state of each source by its origin, such as `file:/etc/engines.yaml`, in the order of the settings."""
        if self._shared.version != self._read_version:
            self._read_version, rows = self._shared.read()
            self._states = {origin: SourceState(*row) for origin, row in rows.items()}
        return self._states

    def keep(self, origins: Collection[str]) -> None:
        """These sources there are now, and no others."""
        states = self.all()
        self._write({origin: states.get(origin, SourceState()) for origin in origins})

    def told(self, origin: str) -> None:
        """A source has said which instances there are."""
        state = self.all()[origin]
        self._write({**self.all(), origin: SourceState(time.time(), state.failures)})

    def failed(self, origin: str, problem: str) -> None:
        """A source could not say which instances there are. `problem`: why, in words for operators."""
        state = self.all()[origin]
        failed = replace(state, failures=state.failures + 1, problem=problem[:_MAX_PROBLEM])
        self._write({**self.all(), origin: failed})

    def _write(self, states: Mapping[str, SourceState]) -> None:
        with self._shared.exclusive():
            self._shared.write({origin: astuple(state) for origin, state in states.items()})
