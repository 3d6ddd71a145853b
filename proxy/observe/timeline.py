"""One unit's way through its stages, and who is told of it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from proxy.terms import Stage
from proxy.usage import Usage

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class StageListener(Protocol):
    """Hears of stages as they end."""

    def stage_ended(self, timeline: Timeline, stage: Stage, began: float, ended: float) -> None:
        """A unit has been in a stage from one second of its clock to another."""


@dataclass(slots=True)
class Timeline:
    """One unit's way through its stages: seconds spent in each by the attempt under way."""

    clock: Callable[[], float] = time.monotonic
    stage: Stage | None = None
    prefiller: str = "-"
    decoder: str = "-"
    prefill_id: str = "-"
    decode_id: str = "-"
    """What each leg was sent as X-Request-Id, or as SGLang's `rid`: the engines' logs have it in their names for the
    request."""
    kv: str = "-"
    """Where the decoder has KV from, as far as is known of it: `transferred`, `computed` once more although it was
    handed over, `unknown`; `local`: nothing was handed over. `-`: it has not answered, or there are no prefillers."""
    seconds: dict[Stage, float] = field(default_factory=dict)
    attempts: int = 0
    resumes: int = 0
    """How often its answer was broken off and taken up again."""
    usage: Usage = field(default_factory=Usage)
    listeners: Sequence[StageListener] = ()
    _entered: float | None = None
    _has_encoded: bool = False

    def begin_attempt(self) -> None:
        """A new attempt starts from nothing, unless it goes on with an answer, or has begun with its media."""
        if self._has_encoded:
            self._has_encoded = False
            return
        self.attempts += 1
        self.stage = None
        self.prefiller = self.decoder = self.prefill_id = self.decode_id = self.kv = "-"
        if not self.usage.is_resumed:
            self.seconds = {stage: spent for stage, spent in self.seconds.items() if stage is Stage.QUEUE}

    def begin_encoding(self) -> None:
        """A new attempt begins with its media."""
        self._has_encoded = False
        self.begin_attempt()
        self.enter(Stage.ENCODE)

    def end_encoding(self) -> None:
        """They are encoded: the attempt that begins next is still the same."""
        self.leave()
        self._has_encoded = True

    def enter(self, stage: Stage) -> None:
        """Leave the stage of now and enter the next."""
        now = self.clock()
        self._end_stage(now)
        self.stage = stage
        self._entered = now

    def leave(self) -> None:
        """The attempt has ended, well or not, in the stage of now. May be called again."""
        if self._entered is not None:
            self._end_stage(self.clock())
            self._entered = None

    def _end_stage(self, now: float) -> None:
        if self.stage is not None and self._entered is not None:
            self.seconds[self.stage] = self.seconds.get(self.stage, 0.0) + now - self._entered
            for listener in self.listeners:
                listener.stage_ended(self, self.stage, self._entered, now)
