"""Least load in seconds: a prompt goes where its prefill will probably have ended first.

Load is what a backend has to do until it is free, in seconds learned from its answers, and what this prompt adds, of
which the part that is probably in its prefix cache costs nothing. That is Mooncake's Algorithm 1 (FAST'25), but for
two things: nothing is fitted offline, and what a prompt adds counts more the busier all are, because it delays those
who come after it.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final
from zlib import crc32

from proxy.backend import Load, Role
from proxy.balancer.policies import LeastLoad
from proxy.balancer.prefill_cost import SECONDS_PER_LOAD, PrefillCost
from proxy.balancer.prefixes import CachedPrefixes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from proxy.backend import Backend
    from proxy.balancer.pick import Candidate, PickRequest, PolicyContext

# Differences that predictions cannot tell: among these it is the prompt that says who.
_TIE_SHARE: Final = 0.05
_TIE_SECONDS: Final = 0.02
# Of a first turn's prompt, the pieces that another one of the same kind shares with it.
_KIND_PIECES: Final = 4
# The share of busy backends over that of idle ones, at most; and how fast the share is followed.
_MOST_CROWDING: Final = 6.0
_BUSY_STEP: Final = 0.02
# Weights are 10 for a token of compute: see policies.WEIGHTS.
_SECONDS_PER_WEIGHT: Final = SECONDS_PER_LOAD / 10
# What is under way is not thought to be over before its answer is here.
_LEAST_LEFT: Final = 0.1
# Those who wait are as many at most, unless they are not going to be chosen for.
_MOST_ASKED: Final = 2048


@dataclass(slots=True, eq=False)
class _Sent:
    """A prompt under way."""

    at: float
    seconds: float
    """Predicted."""
    tokens: float
    computed: float
    """Of the tokens, those that are not expected to be cached."""
    hit: int
    keys: Sequence[int]
    ends: Sequence[float]
    ages: Sequence[float | None]
    new: Sequence[int]
    told: tuple[int, int] | None = None
    """Tokens of the prompt, and those of them that were cached, as the backend told."""


@dataclass(slots=True, eq=False)
class _Asked:
    """A request that is chosen for, or waits to be, and what it takes each backend."""

    request: PickRequest
    keys: Sequence[int]
    ends: Sequence[float]
    """Tokens up to the end of each piece."""
    tokens: int
    """Of the prompt."""
    there: dict[Backend, tuple[int, int, float]]
    """The version of what is known of a backend, the pieces that are cached there, and seconds."""


class LeastSeconds(LeastLoad):
    """For prefillers; other roles get the least load in tokens."""

    crowding = 1.0
    """How much a prompt's own work counts for those behind it; 0: it does not."""
    ahead_seconds = 0.05
    """A backend gets its next prompt when what it has will take no longer: that hides the way there and back."""
    batch_tokens = 16_384
    """Or when it has less to compute, unless it works on one prompt at a time."""

    def __init__(self, context: PolicyContext | None = None) -> None:
        super().__init__(context)
        self._cost = PrefillCost()
        self._prefixes: dict[Backend, CachedPrefixes] = {}
        self._versions: dict[Backend, int] = {}
        self._sent: dict[Backend, dict[int, _Sent]] = {}  # by request, the oldest first
        self._answered: dict[Backend, float] = {}
        self._busy = 0.0
        self._asked: OrderedDict[int, _Asked] = OrderedDict()  # by the subject's id
        self._decided: tuple[object, Backend] | None = None

    def choose(self, candidates: Sequence[Candidate], request: PickRequest) -> Candidate:
        """The soonest done; among those that cannot be told apart, prompts that begin alike go the same way."""
        if candidates[0].backend.role is Role.DECODE:
            return super().choose(candidates, request)
        decided, self._decided = self._decided, None
        if decided is not None and decided[0] is (request.subject or request):
            for candidate in candidates:
                if candidate.backend == decided[1]:
                    return candidate
        now = self.context.clock()
        waits = [self._left(candidate.backend, candidate.weight * _SECONDS_PER_WEIGHT, now) for candidate in candidates]
        return candidates[self._soonest(candidates, waits, request)]

    def has_room(self, candidates: Sequence[Candidate]) -> bool:
        """Whether a prompt that went to one of them now would begin almost at once."""
        if candidates[0].backend.role is Role.DECODE:
            return super().has_room(candidates)
        waits = self._waits(candidates)
        return any(self._is_free(candidate, wait) for candidate, wait in zip(candidates, waits, strict=True))

    def work_seconds(self, candidates: Sequence[Candidate], request: PickRequest) -> float:
        """What a prompt takes where it takes least; a decoder's work is not known."""
        if candidates[0].backend.role is Role.DECODE:
            return 0.0
        asked = self._ask(request)
        return min(self._own(candidate.backend, asked)[1] for candidate in candidates)

    def first_to_go(self, candidates: Sequence[Candidate], waiting: Sequence[PickRequest]) -> int | None:
        """The first that is soonest done where there is room. Those before it wait for what they will be done sooner
        with, each behind those that wait for the same.
        """
        if candidates[0].backend.role is Role.DECODE:
            return 0
        waits = self._waits(candidates)
        self._busy += _BUSY_STEP * (1 - waits.count(0.0) / len(waits) - self._busy)
        free = [self._is_free(candidate, wait) for candidate, wait in zip(candidates, waits, strict=True)]
        for place, request in enumerate(waiting):
            best = self._soonest(candidates, waits, request)
            backend = candidates[best].backend
            if free[best]:
                self._decided = request.subject or request, backend
                return place
            waits[best] += self._own(backend, self._ask(request))[1]
        return None

    def cost_of(self, backend: Backend, request: PickRequest) -> Load:
        """The predicted seconds, in what they are in tokens."""
        load = request.load(backend.role)
        if backend.role is Role.DECODE:
            return load
        return Load(compute=round(self._own(backend, self._ask(request))[1] / SECONDS_PER_LOAD), kv=load.kv)

    def dispatched(self, backend: Backend, request: PickRequest) -> None:
        """What is under way counts as cached, or a burst with one prompt would scatter."""
        if backend.role is Role.DECODE:
            return
        asked = self._ask(request)
        hit, seconds = self._own(backend, asked)
        keys, ends = asked.keys, asked.ends
        prefixes = self._cached(backend)
        ages = prefixes.ages(keys)
        computed = request.prompt_tokens - (ends[hit - 1] if hit else 0.0)
        new = prefixes.use(keys, ends, computed)
        self._changed(backend)
        sent = _Sent(self.context.clock(), seconds, request.prompt_tokens, computed, hit, keys, ends, ages, new)
        self._sent.setdefault(backend, {})[id(request)] = sent
        self._asked.pop(id(request.subject or request), None)

    def told(self, backend: Backend, request: PickRequest, prompt_tokens: int, cached_tokens: int | None) -> None:
        """What the backend says of the prompt."""
        sent = self._sent.get(backend, {}).get(id(request))
        if sent is not None and cached_tokens is not None:
            sent.told = prompt_tokens, cached_tokens

    def ended(self, backend: Backend, request: PickRequest, served: bool) -> None:
        """An answer teaches how long prompts take and what is cached; of a failure there is nothing in the cache."""
        sent = self._sent.get(backend, {}).pop(id(request), None)
        if sent is None:
            return
        now = self.context.clock()
        prefixes = self._cached(backend)
        self._changed(backend)
        if not served:
            prefixes.drop(sent.new)
            return
        tokens, cached = sent.tokens, sent.ends[sent.hit - 1] if sent.hit else 0.0
        if sent.told is not None:
            told_tokens, told_cached = sent.told
            share = told_cached / max(1, told_tokens)
            prefixes.odometer += cached - share * tokens
            prefixes.learn(sent.ages, sent.ends, cached, share * tokens)
            tokens, cached = float(told_tokens), float(told_cached)
        # Prompts that were sent one behind the other were computed one after the other.
        began = max(sent.at, self._answered.get(backend, 0.0))
        self._answered[backend] = now
        self._cost.learn(backend, tokens - cached, cached, now - began)

    def _soonest(self, candidates: Sequence[Candidate], waits: Sequence[float], request: PickRequest) -> int:
        """The place of the candidate with the least score: its wait, and what the prompt adds."""
        asked = self._ask(request)
        factor = 1 + self.crowding * min(_MOST_CROWDING, self._busy / max(1e-9, 1 - self._busy))
        scores = [
            wait + factor * self._own(candidate.backend, asked)[1]
            for candidate, wait in zip(candidates, waits, strict=True)
        ]
        least = min(scores)
        near = least + max(_TIE_SECONDS, _TIE_SHARE * least)
        equal = [place for place, score in enumerate(scores) if score <= near]
        if len(equal) == 1:
            return equal[0]
        if not asked.keys:
            chosen = self._take_turn([candidates[place] for place in equal])
            return next(place for place in equal if candidates[place] is chosen)
        if any(self._own(candidates[place].backend, asked)[0] for place in equal):
            return scores.index(least)
        kind = asked.keys[min(len(asked.keys), _KIND_PIECES) - 1] & 0xFFFFFFFF
        return max(equal, key=lambda place: crc32(candidates[place].backend.name.encode(), kind))

    def _cached(self, backend: Backend) -> CachedPrefixes:
        known = self._prefixes.get(backend)
        if known is None:
            known = self._prefixes[backend] = CachedPrefixes()
        return known

    def _changed(self, backend: Backend) -> None:
        """What is known of it is not what it was."""
        self._versions[backend] = self._versions.get(backend, 0) + 1

    def _ask(self, request: PickRequest) -> _Asked:
        """What is known of a request, worked out once while it waits."""
        subject = request.subject or request
        asked = self._asked.get(id(subject))
        if asked is None or (asked.request.subject or asked.request) is not subject:
            prefix = request.prefix_keys
            tokens = request.prompt_tokens
            per_byte = tokens / prefix.sizes[-1] if prefix.sizes else 0.0
            asked = _Asked(request, prefix.keys, [size * per_byte for size in prefix.sizes], tokens, {})
            self._asked[id(subject)] = asked
            if len(self._asked) > _MOST_ASKED:
                self._asked.popitem(last=False)
        return asked

    def _own(self, backend: Backend, asked: _Asked) -> tuple[int, float]:
        """The pieces of a prompt that are probably cached there, and the seconds that the rest takes."""
        if asked.request.subject is None:  # what is only passed on
            return 0, asked.request.load(backend.role).compute * SECONDS_PER_LOAD
        version = self._versions.get(backend, 0)
        known = asked.there.get(backend)
        if known is None or known[0] != version:
            prefixes = self._cached(backend)
            hit = prefixes.hit(asked.keys)
            cached = prefixes.trust * asked.ends[hit - 1] if hit else 0.0
            known = asked.there[backend] = version, hit, self._cost.seconds(backend, asked.tokens - cached, cached)
        return known[1], known[2]

    def _waits(self, candidates: Sequence[Candidate]) -> list[float]:
        """Seconds until each of them is free; 0.0: it is."""
        now = self.context.clock()
        loads = candidates[0].scoreboard.weigh([candidate.backend.slot for candidate in candidates], 1, 0)
        return [
            self._left(candidate.backend, load * SECONDS_PER_LOAD, now) if load else 0.0
            for candidate, load in zip(candidates, loads, strict=True)
        ]

    def _is_free(self, candidate: Candidate, wait: float) -> bool:
        """Whether what it has is soon done, or so short that an engine which works on several computes more with it."""
        if candidate.limit is not None and not candidate.has_room:
            return False
        if wait < self.ahead_seconds:
            return True
        if candidate.limit == 1:
            return False
        sent = self._sent.get(candidate.backend)
        return sum(each.computed for each in sent.values()) < self.batch_tokens if sent else False

    def _left(self, backend: Backend, load_seconds: float, now: float) -> float:
        """What is left of its load: less what the oldest prompt under way has probably behind it."""
        if not (sent := self._sent.get(backend)):
            return load_seconds
        oldest = next(iter(sent.values()))
        spent = now - max(oldest.at, self._answered.get(backend, 0.0))
        # One that is overdue is expected to take as long again as it is late: it may never answer.
        left = max(oldest.seconds - spent, spent - oldest.seconds, _LEAST_LEFT * oldest.seconds)
        return max(0.0, load_seconds - oldest.seconds + left)
