"""The prompts that prefillers are compared for, those that were sent, and what answers say of the time they take."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple

from proxy.balancer.pick import Tracker

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    from proxy.balancer.pick import PickRequest, Prediction


# Shorter prompts are not looked up: to compute them anew takes hardly longer.
LEAST_TOKENS: Final = 256


@dataclass(slots=True, eq=False)
class ComparedPrompt:
    """A request that is chosen for, or waits to be, and what it takes each backend."""

    request: PickRequest
    keys: Sequence[int]
    ends: Sequence[float]
    """Tokens up to the end of each piece."""
    tokens: int
    """Of the prompt."""
    there: dict[Hashable, tuple[int, int, float]] = field(default_factory=dict)
    """By Prefiller: the version of what is known of it, the pieces that are cached there, and seconds."""


def compared_prompt(request: PickRequest) -> ComparedPrompt:
    """What is to be known of a request."""
    subject = request.subject
    tokens = 0 if subject is None else subject.prompt_tokens
    if subject is None or tokens < LEAST_TOKENS or not (prefix := subject.prefix_keys).keys:
        return ComparedPrompt(request, (), (), tokens)
    per_byte = tokens / prefix.sizes[-1]
    return ComparedPrompt(request, prefix.keys, list(map(per_byte.__mul__, prefix.sizes)), tokens)


@dataclass(slots=True, eq=False)
class Sent(Tracker):
    """A prompt under way. `known` and `odometer` are what CachedPrefixes wants to know of it again."""

    on_end: Callable[[Sent, bool], None]
    """Called when it has been computed, or will not be."""
    compute: int
    kv: int
    asked: ComparedPrompt
    at: float
    seconds: float
    """Predicted."""
    cached: float
    """Of the prompt's tokens, those that are expected to be cached."""
    known: Sequence[float | None]
    odometer: float
    ahead: int
    """Prompts that were there before it."""
    wait: float
    """Predicted, for these."""
    prediction: Prediction | None = None
    answer: tuple[int, int] | None = None
    """Tokens of the prompt, and those of them that were cached, as the backend told."""

    def told(self, prompt_tokens: int, cached_tokens: int | None) -> None:
        """See Tracker."""
        if cached_tokens is not None:
            self.answer = prompt_tokens, cached_tokens

    def ended(self, served: bool, answer_tokens: int | None) -> None:
        """An answer teaches how long prompts take and what is cached."""
        self.on_end(self, served)


class PrefillSample(NamedTuple):
    """A prompt that has been computed: tokens that were not cached and that were, and how long it took."""

    uncached: float
    cached: float
    seconds: float
    """Since the answer before it, or since it was sent if that was later."""
    whole: float
    """Since it was sent."""
    ahead: float
    """Prompts that were there when it was sent."""
    was_behind: float
    """Not 0: it came while there were two others at least, so that it could be computed together with the second."""
    overtook: float
    """Not 0: one that was sent before it is still under way."""
    fill: float = 0.0
    """How many times what the prefiller computes at a time was there when it ended, with this one: prompts for each
    rank, or tokens of a step."""

    @property
    def attention(self) -> float:
        """What its attention costs grow with."""
        return self.uncached * (self.cached + self.uncached / 2)


class Step(NamedTuple):
    """Prompts that were answered at once: they were computed together, in the time that passed before the first."""

    uncached: float
    attention: float
    seconds: float
    began: float
    """By the clock."""
    largest: float
    """The uncached tokens of its largest prompt."""

    def and_another(self, sample: PrefillSample) -> Step:
        """Return the step with a further prompt, which was answered right behind the others."""
        uncached, attention = self.uncached + sample.uncached, self.attention + sample.attention
        largest = max(self.largest, sample.uncached)
        return Step(uncached, attention, self.seconds + sample.seconds, self.began, largest)

    @property
    def cached(self) -> float:
        """Behind so many cached tokens one prompt would take as long; less than 0, as several attend to less."""
        return self.attention / self.uncached - self.uncached / 2
