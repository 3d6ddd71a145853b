"""One unit's way through its stages and attempts."""

from __future__ import annotations

import time
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from proxy.observe.attempt_record import AttemptFailure, AttemptRecord, LeftLeg, seconds_of
from proxy.terms import Stage
from proxy.usage import Usage

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from proxy.balancer.choice import Pick
    from proxy.balancer.pick import Prediction
    from proxy.errors import UpstreamError
    from proxy.observe.attempt_record import Marks


_NOTHING: Final[Mapping[Stage, float]] = MappingProxyType({})


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
    prefill_pick: Pick | None = None
    decode_pick: Pick | None = None
    """Why the backends of the attempt under way were chosen; None: there is none of that role."""
    _left: Sequence[LeftLeg] = ()
    _history: Sequence[AttemptRecord] | None = None
    _failure: AttemptFailure | None = None
    _continues: bool = False
    _seen_resumes: int = 0
    _spent: Mapping[Stage, float] = _NOTHING  # seconds of the attempts before that count
    _has_encoded: bool = False
    _summed: tuple[Marks, int, dict[Stage, float]] | None = None  # of which marks, and of how many, the seconds are

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.marks: Marks = []
        """Of the attempt under way. Whoever knows them all at once may set them."""
        self.usage = Usage()

    @property
    def stage(self) -> Stage | None:
        """The one that the attempt under way is in or, if it is over, was in last; None: it has entered none."""
        return next((stage for stage, _ in reversed(self.marks) if stage is not None), None)

    @property
    def seconds(self) -> dict[Stage, float]:
        """Spent in each stage by the attempt under way, without the one that it is in. Not to be changed."""
        marks, summed = self.marks, self._summed
        if summed is None or summed[0] is not marks or summed[1] != len(marks):  # all who tell of a request ask
            summed = self._summed = marks, len(marks), seconds_of(marks, self._spent)
        return summed[2]

    @property
    def history(self) -> Sequence[AttemptRecord]:
        """All attempts, in order. To be asked when they are over: it is worked out once."""
        if self._history is None:
            self._history = (*self.past, self.attempt) if self.attempts else self.past
        return self._history

    @property
    def attempt(self) -> AttemptRecord:
        return AttemptRecord(
            *(self.prefiller, self.decoder, self.prefill_id, self.decode_id, self.kv),
            picks=(self.prefill_pick, self.decode_pick),
            left=self._left,
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
            self.prefill_pick = self.decode_pick = self._failure = None
            self._left = ()
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

    def left_prefiller(self, pick: Pick) -> None:
        """The prefill leg, of which nothing came, is sent again, to this one."""
        self._left = (*self._left, LeftLeg(self.prefiller, self.prefill_id))
        self.prefill_pick = pick

    def left_decoder(self, pick: Pick) -> None:
        """The decode leg is sent to this one instead."""
        self._left = (*self._left, LeftLeg(self.decoder, self.decode_id))
        self.decode_pick = pick

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
        self.marks.append((stage, self.clock()))

    def leave(self) -> None:
        """The attempt has ended, well or not, in the stage of now. May be called again."""
        marks = self.marks
        if marks and marks[-1][0] is not None:
            marks.append((None, self.clock()))
