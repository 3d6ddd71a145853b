"""What one worker knows of one prefiller: what it has sent there, how far that is, and what is probably cached."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple

from proxy.balancer.prefill_cost import SECONDS_PER_LOAD
from proxy.balancer.prefixes import CachedPrefixes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from proxy.backend import Backend

# What is under way is not thought to be over before its answer is here.
_LEAST_LEFT: Final = 0.1


@dataclass(slots=True, eq=False)
class Sent:
    """A prompt under way. `keys`, `ends`, `known` and `odometer` are what CachedPrefixes wants to know of it again."""

    at: float
    seconds: float
    """Predicted."""
    charge: int
    tokens: float
    cached: float
    """Of the tokens, those that are expected to be cached."""
    keys: Sequence[int]
    ends: Sequence[float]
    known: Sequence[float | None]
    odometer: float
    told: tuple[int, int] | None = None
    """Tokens of the prompt, and those of them that were cached, as the backend told."""


class Sample(NamedTuple):
    """A prompt that has been computed: tokens that were not cached and that were, and how long it took."""

    uncached: float
    cached: float
    seconds: float


@dataclass(slots=True, eq=False)
class Prefiller:
    """`version` moves with what is cached and how fast it is."""

    backend: Backend
    cached: CachedPrefixes = field(default_factory=CachedPrefixes)
    slowness: float = 1.0
    version: int = 0
    charge: int = 0
    """Of all that was sent and is under way."""
    computing: float = 0.0
    """Tokens of it that are not expected to be cached."""
    _sent: dict[int, Sent] = field(default_factory=dict)  # by request, the oldest first
    _answered_at: float = 0.0

    @property
    def is_busy(self) -> bool:
        """Something that this worker has sent is under way."""
        return bool(self._sent)

    def send(
        self,
        request: int,
        keys: Sequence[int],
        ends: Sequence[float],
        tokens: int,
        hit: int,
        seconds: float,
        now: float,
    ) -> None:
        """A prompt of so many tokens goes there, of whose pieces, which end at `ends`, so many are probably cached. It
        takes so long by prediction. What is under way counts as cached, or a burst with one prompt would scatter.
        """
        cached = ends[hit - 1] if hit else 0.0
        prefixes = self.cached
        odometer = prefixes.odometer
        known = prefixes.use(keys, ends, tokens - cached)
        charge = round(seconds / SECONDS_PER_LOAD)
        self.version += 1
        self.charge += charge
        self.computing += tokens - cached
        self._sent[request] = Sent(now, seconds, charge, tokens, cached, keys, ends, known, odometer)

    def tell(self, request: int, prompt_tokens: int, cached_tokens: int) -> None:
        """How long its prompt was, and what of it was cached."""
        if (sent := self._sent.get(request)) is not None:
            sent.told = prompt_tokens, cached_tokens

    def end(self, request: int, served: bool, now: float) -> Sample | None:
        """It has been computed, or will not be; None: that teaches nothing of the time it takes."""
        sent = self._sent.pop(request, None)
        if sent is None:
            return None
        tokens, cached, prefixes = sent.tokens, sent.cached, self.cached
        self.version += 1
        self.charge -= sent.charge
        self.computing = self.computing - (tokens - cached) if self._sent else 0.0
        if not served:  # of a failure there is nothing in the cache
            prefixes.drop([key for key, reading in zip(sent.keys, sent.known, strict=True) if reading is None])
            return None
        if sent.told is not None:
            told_tokens, told_cached = sent.told
            if sent.keys:
                there = tokens * told_cached / max(1, told_tokens)
                prefixes.odometer += cached - there
                prefixes.learn(sent.known, sent.odometer, sent.ends, cached, there)
            tokens, cached = float(told_tokens), float(told_cached)
        # Prompts that were sent one behind the other were computed one after the other.
        began = max(sent.at, self._answered_at)
        self._answered_at = now
        return Sample(tokens - cached, cached, now - began)

    def left(self, load_seconds: float, now: float) -> float:
        """What is left of its load: less what the oldest prompt under way has probably behind it."""
        if not self._sent:
            return load_seconds
        oldest = next(iter(self._sent.values()))
        spent = now - max(oldest.at, self._answered_at)
        # One that is overdue is expected to take as long again as it is late: it may never answer.
        left = max(oldest.seconds - spent, spent - oldest.seconds, _LEAST_LEFT * oldest.seconds)
        return max(0.0, load_seconds - oldest.seconds + left)
