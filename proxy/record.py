"""Record: what happened to one request, for the access line and the metrics. No prompt and no completion in it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

from proxy.wire.openai import prompt_details

if TYPE_CHECKING:
    from collections.abc import Callable


class Stage(StrEnum):
    """Where a unit of a request is; the letter stands second in the access line's `term`."""

    QUEUE = "Q"
    ENCODE = "E"
    PREFILL = "F"
    HANDOFF = "H"
    FIRST_TOKEN = "T"
    STREAM = "D"

    @cached_property
    def label(self) -> str:
        """The metric label: the member's name in lower case."""
        return self.name.lower()


_STAGE_FIELDS: Final = tuple((f"t_{stage.label}", stage) for stage in Stage)


@dataclass(slots=True)
class Journey:
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
    is_resumed: bool = False
    """The attempt under way goes on with an answer that another one began: what engines tell of the prompt is not about
    the client's."""
    prompt_details: dict[str, Any] | None = None
    """The prefiller's `prompt_tokens_details`; None when it does not tell."""
    counts_reasoning: bool = False
    """The prefiller counts reasoning tokens, so a decoder does so in a chat."""
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    _entered: float | None = None
    _has_encoded: bool = False

    @property
    def cached_tokens(self) -> int | None:
        """Prompt tokens that were found in the prefix cache; None when that is not known."""
        return _count((self.prompt_details or {}).get("cached_tokens"), None)

    def begin_attempt(self) -> None:
        """A new attempt starts from nothing, unless it goes on with an answer, or has begun with its media."""
        if self._has_encoded:
            self._has_encoded = False
            return
        self.attempts += 1
        self.stage = None
        self.prefiller = self.decoder = self.prefill_id = self.decode_id = self.kv = "-"
        if not self.is_resumed:
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

    def saw_prompt_usage(self, usage: Any) -> None:
        """Take what a usage object, whatever it really is, says of the prompt.

        The first to tell is right: later attempts find in the cache what the first ones put there.
        """
        if isinstance(usage, dict) and self.prompt_details is None and not self.is_resumed:
            self.prompt_tokens = _count(usage.get("prompt_tokens"), self.prompt_tokens)
            self.prompt_details = prompt_details(usage)
            self.counts_reasoning = usage.get("completion_tokens_details") is not None

    def saw_completion_usage(self, usage: Any) -> None:
        """Take what a usage object, whatever it really is, says of the answer."""
        if isinstance(usage, dict):
            self.completion_tokens = _count(usage.get("completion_tokens"), self.completion_tokens)


@dataclass(slots=True)
class Record:
    """One client request, with a Journey for each unit it was split into."""

    api: str
    """The dialect's label."""
    request_id: str
    caller: str = "-"
    """The name of the key that the client showed; `-` when clients need none."""
    stream: bool = False
    clock: Callable[[], float] = time.monotonic
    started: float = 0.0
    first_token_seconds: float | None = None
    journeys: list[Journey] = field(default_factory=list)
    error: BaseException | None = None
    """What ended the request before its answer was complete."""
    lost_engines: int = 0
    """Engines that went down under it, or under the same request before, and perhaps because of it."""
    committed: bool = False
    """A streamed answer's status and headers went out."""

    def __post_init__(self) -> None:
        self.started = self.clock()

    def journey(self) -> Journey:
        """The record of one more unit."""
        journey = Journey(self.clock)
        self.journeys.append(journey)
        return journey

    def first_token(self) -> None:
        """The client was sent the first part of the answer; later calls change nothing."""
        if self.first_token_seconds is None:
            self.first_token_seconds = self.clock() - self.started

    @property
    def stage(self) -> Stage | None:
        """The earliest stage any unit has not left: where a request that ends now was stuck."""
        order = list(Stage)
        stages = [journey.stage for journey in self.journeys if journey.stage is not None]
        return min(stages, key=order.index, default=None)

    def tokens(self) -> tuple[int, int, int]:
        """Prompt, cached and completion tokens as far as engines reported them."""
        prompt = cached = completion = 0
        for journey in self.journeys:
            prompt += journey.prompt_tokens or 0
            cached += journey.cached_tokens or 0
            completion += journey.completion_tokens or 0
        return prompt, cached, completion

    def fields(self, status: int, term: str, duration_seconds: float) -> dict[str, object]:
        """The access line. With several units: the first one's backends, the sum of attempts, the longest stages."""
        journeys = self.journeys or [Journey(self.clock)]
        first, *others = journeys
        seconds = first.seconds
        if others:
            spent = {stage for journey in journeys for stage in journey.seconds}
            seconds = {stage: max(journey.seconds.get(stage, 0.0) for journey in journeys) for stage in spent}
        prompt, cached, completion = self.tokens()
        return {
            "id": self.request_id,
            "key": self.caller,
            "api": self.api,
            "stream": self.stream,
            "code": status,
            "term": term,
            "p": first.prefiller,
            "d": first.decoder,
            "p_id": first.prefill_id,
            "d_id": first.decode_id,
            "kv": first.kv,
            "units": len(self.journeys),
            "attempts": sum(journey.attempts for journey in self.journeys),
            "resumes": sum(journey.resumes for journey in self.journeys),
            **{
                name: round(seconds.get(stage, 0.0), 4)
                for name, stage in _STAGE_FIELDS
                if stage is not Stage.ENCODE or stage in seconds  # few have encoders
            },
            "ttft": None if self.first_token_seconds is None else round(self.first_token_seconds, 4),
            "dur": round(duration_seconds, 4),
            "tokens_in": prompt,
            "tokens_cached": cached,
            "tokens_out": completion,
            **({"lost_engines": self.lost_engines} if self.lost_engines else {}),
            "error": getattr(self.error, "message", None),
        }


def _count(value: Any, otherwise: int | None) -> int | None:
    return value if isinstance(value, int) else otherwise
