"""One unit's way through its stages and attempts, and who is told of it."""

from __future__ import annotations

import time
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, NamedTuple

from proxy.terms import Stage
from proxy.usage import Usage

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from proxy.balancer.pick import Prediction
    from proxy.errors import UpstreamError

    StageListener = Callable[["Timeline", Stage, float, float], None]
    """Hears of each stage as it ends: a unit has been in it from one second of its clock to another."""

_NOTHING: Final[Mapping[Stage, float]] = MappingProxyType({})

Marks = list[tuple[Stage | None, float]]
"""The stages that an attempt has entered, None where it left one for no other, each with the clock's second."""


class AttemptFailure(NamedTuple):
    """What an instance has ended an attempt by."""

    kind: str
    """A `Failure`."""
    instance: str


class AttemptRecord(NamedTuple):
    """One attempt: as a Timeline has it while it is under way."""

    prefiller: str
    decoder: str
    prefill_id: str
    decode_id: str
    kv: str
    continues: bool
    """It goes on with the answer that the one before was broken off in."""
    failure: AttemptFailure | None
    """None: it succeeded, or its end was no instance's doing."""
    marks: Marks

    @property
    def seconds(self) -> dict[Stage, float]:
        """Spent in each stage."""
        return _seconds(self.marks, {})


class Timeline:
    """One unit's way through its stages. What follows from the marks is worked out when somebody asks."""

    prefiller: str = "-"
    decoder: str = "-"
    prefill_id: str = "-"
    decode_id: str = "-"
    """What each leg was sent as X-Request-Id, or as SGLang's `rid`: the engines' logs have it in their names for the
    request."""
    kv: str = "-"
    """Where the decoder has KV from, as far as is known of it: `transferred`, `computed` once more although it was
    handed over, `unknown`; `local`: nothing was handed over. `-`: it has not answered, or there are no prefillers."""
    prediction: Prediction | None = None
    """What was thought of the last attempt's prefill when its prefiller was chosen; None: nothing."""
    attempts: int = 0
    resumes: int = 0
    """How often its answer was broken off and taken up again."""
    past: Sequence[AttemptRecord] = ()
    """The attempts before the one under way, in order."""
    _failure: AttemptFailure | None = None
    _continues: bool = False
    _seen_resumes: int = 0
    _spent: Mapping[Stage, float] = _NOTHING  # seconds of the attempts before that count
    _has_encoded: bool = False

    def __init__(self, clock: Callable[[], float] = time.monotonic, on_stage: StageListener | None = None) -> None:
        """`on_stage`: None where nobody listens."""
        self.clock = clock
        self.on_stage = on_stage
        self.marks: Marks = []
        """Of the attempt under way. Whoever knows them all at once may set them, if there is no `on_stage`."""
        self.usage = Usage()

    @property
    def stage(self) -> Stage | None:
        """The one that the attempt under way is in or, if it is over, was in last; None: it has entered none."""
        return next((stage for stage, _ in reversed(self.marks) if stage is not None), None)

    @property
    def seconds(self) -> dict[Stage, float]:
        """Spent in each stage by the attempt under way, without the one that it is in."""
        return _seconds(self.marks, self._spent)

    @property
    def attempt(self) -> AttemptRecord:
        """The one under way, or the last one."""
        return AttemptRecord(
            *(self.prefiller, self.decoder, self.prefill_id, self.decode_id, self.kv),
            continues=self._continues,
            failure=self._failure,
            marks=self.marks,
        )

    @property
    def foretold(self) -> tuple[Prediction, float] | None:
        """What was thought of the prefill, and the seconds that it has really taken; None: it was not predicted, or
        not done at the first attempt.
        """
        if self.prediction is None or self.attempts != 1 or self.usage.prompt_tokens is None:
            return None
        seconds = self.seconds.get(Stage.PREFILL)
        return None if seconds is None else (self.prediction, seconds)

    def begin_attempt(self) -> None:
        """A new attempt starts from nothing, unless it goes on with an answer, or has begun with its media."""
        if self._has_encoded:
            self._has_encoded = False
            return
        self.attempts += 1
        if self.attempts > 1:
            self.past = (*self.past, self.attempt)
            self._failure = None
            self._continues = self.resumes > self._seen_resumes
            self._seen_resumes = self.resumes
            self.prefiller = self.decoder = self.prefill_id = self.decode_id = self.kv = "-"
        if self.marks or self._spent:
            spent = self.seconds
            if not self.usage.is_resumed:
                spent = {stage: seconds for stage, seconds in spent.items() if stage is Stage.QUEUE}
            self._spent = spent
            self.marks = []

    def failed(self, error: UpstreamError) -> None:
        """The attempt under way was ended by this."""
        self._failure = AttemptFailure(error.failure.value, error.backend.name)

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
        if self.on_stage is not None:
            self._tell(now)
        self.marks.append((stage, now))

    def leave(self) -> None:
        """The attempt has ended, well or not, in the stage of now. May be called again."""
        marks = self.marks
        if marks and marks[-1][0] is not None:
            now = self.clock()
            if self.on_stage is not None:
                self._tell(now)
            marks.append((None, now))

    def _tell(self, now: float) -> None:
        stage, began = self.marks[-1] if self.marks else (None, now)
        if stage is not None and self.on_stage is not None:
            self.on_stage(self, stage, began, now)


def _seconds(marks: Marks, before: Mapping[Stage, float]) -> dict[Stage, float]:
    """Spent in each stage that was left, and before."""
    spent = dict(before)
    stage, began = None, 0.0
    for entered, at in marks:
        if stage is not None:
            spent[stage] = spent.get(stage, 0.0) + (at - began)
        stage, began = entered, at
    return spent
