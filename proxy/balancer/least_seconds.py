"""Least load in seconds: a prompt goes where its prefill will probably have ended first.

Load is what a backend has to do until it is free, in seconds learned from its answers, and what this prompt adds, of
which the part that is probably in its prefix cache costs nothing. That is Mooncake's Algorithm 1 (FAST'25), but for
two things: nothing is fitted offline, and what a prompt adds counts more the busier all are, because it delays those
who come after it.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final
from zlib import crc32

from proxy.backend import Load, Role
from proxy.balancer.pick import Prediction
from proxy.balancer.policies import LeastLoad
from proxy.balancer.prefill_cost import SECONDS_PER_LOAD, PrefillCost
from proxy.balancer.prefiller import Prefiller, hear

if TYPE_CHECKING:
    from collections.abc import Sequence

    from proxy.backend import Backend
    from proxy.balancer.pick import Candidate, PickRequest, PolicyContext
    from proxy.balancer.prefiller import Sample

# Differences that predictions cannot tell.
_TIE_SHARE: Final = 0.05
_TIE_SECONDS: Final = 0.02
# Shorter prompts are not looked up: to compute them anew takes hardly longer.
_LEAST_TOKENS: Final = 256
# Of a first turn's prompt, the pieces that another one of the same kind shares with it.
_KIND_PIECES: Final = 8
# The share of busy backends over that of idle ones, at most; and how fast the share is followed.
_MOST_CROWDING: Final = 6.0
_BUSY_STEP: Final = 0.02
# Weights are 10 for a token of compute: see policies.WEIGHTS.
_SECONDS_PER_WEIGHT: Final = SECONDS_PER_LOAD / 10
# Those who wait are as many at most, unless they are not going to be chosen for.
_MOST_ASKED: Final = 2048
# More answers than one in such a time teach nothing new.
_LESSON_SECONDS: Final = 0.02


@dataclass(slots=True, eq=False)
class _Asked:
    """A request that is chosen for, or waits to be, and what it takes each backend."""

    request: PickRequest
    keys: Sequence[int]
    ends: Sequence[float]
    """Tokens up to the end of each piece."""
    tokens: int
    """Of the prompt."""
    there: dict[Prefiller, tuple[int, int, float]] = field(default_factory=dict)
    """The version of what is known of a backend, the pieces that are cached there, and seconds."""


# Who is going to get a request: both, and the pieces that are cached there and the seconds that the rest takes.
_Choice = tuple["PickRequest", Prefiller, _Asked, int, float]


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
        self._prefillers: dict[Backend, Prefiller] = {}
        self._by_slot: dict[int, Prefiller] = {}
        self._seen: Sequence[Candidate] = ()  # the candidates of the last time, and what is known of them
        self._seen_prefillers: list[Prefiller] = []
        self._seen_slots: list[int] = []
        self._busy = 0.0
        self._next_lesson = 0.0
        self._asked: OrderedDict[int, _Asked] = OrderedDict()  # who waits, by the subject's id
        self._decided: tuple[object, list[Prefiller]] | None = None  # for whom it is best to go where
        self._chosen: _Choice | None = None

    # Where it goes

    def choose(self, candidates: Sequence[Candidate], request: PickRequest) -> Candidate:
        """The soonest done; of those that cannot be told apart the one to which prompts that begin alike go, or which
        is least loaded.
        """
        if candidates[0].backend.role is Role.DECODE:
            return super().choose(candidates, request)
        prefillers = self._known(candidates)
        decided, self._decided = self._decided, None
        if decided is not None and decided[0] is (request.subject or request):
            both = zip(candidates, prefillers, strict=True)
            if free := [candidate for candidate, prefiller in both if prefiller in decided[1]]:
                candidates = free
                prefillers = [self._prefillers[candidate.backend] for candidate in free]
        asked = self._asked.get(id(request.subject)) or self._ask(request)
        now = self.context.clock()
        waits = [
            prefiller.left(candidate.weight * _SECONDS_PER_WEIGHT, now) if candidate.weight else 0.0
            for candidate, prefiller in zip(candidates, prefillers, strict=True)
        ]
        scores, near = self._scores(prefillers, waits, asked)
        equal = [place for place, score in enumerate(scores) if score <= near]
        if len(equal) == 1:
            place = equal[0]
        elif not asked.keys:
            tied = candidates if len(equal) == len(candidates) else [candidates[place] for place in equal]
            place = equal[tied.index(super().choose(tied, request))]
        elif any(asked.there[prefillers[place]][1] for place in equal):
            place = scores.index(min(scores))
        else:
            kind = asked.keys[min(len(asked.keys), _KIND_PIECES) - 1] & 0xFFFFFFFF
            place = max(equal, key=lambda place: crc32(candidates[place].backend.name.encode(), kind))
        self._chosen = request, prefillers[place], asked, *self._own(prefillers[place], asked)
        return candidates[place]

    def cost_of(self, backend: Backend, request: PickRequest) -> Load:
        """The predicted seconds, in what they are in tokens."""
        load = request.load(backend.role)
        if backend.role is Role.DECODE or request.subject is None:
            return load
        return Load(round(self._choice(backend, request)[4] / SECONDS_PER_LOAD), load.kv)

    def _choice(self, backend: Backend, request: PickRequest) -> _Choice:
        """What is known of a backend that was chosen, by whomever, and of the request."""
        chosen = self._chosen
        if chosen is None or chosen[0] is not request or chosen[1].backend is not backend:
            prefiller, asked = self._of(backend), self._ask(request)
            chosen = self._chosen = request, prefiller, asked, *self._own(prefiller, asked)
        return chosen

    # What becomes of it

    def dispatched(self, backend: Backend, request: PickRequest) -> Prediction | None:
        """What is under way counts as cached, or a burst with one prompt would scatter."""
        if backend.role is Role.DECODE:
            return None
        _, prefiller, asked, hit, seconds = self._choice(backend, request)
        self._chosen = None
        now = self.context.clock()
        wait = prefiller.left(prefiller.charge * SECONDS_PER_LOAD, now) if prefiller.charge else 0.0
        prefiller.send(id(request), asked.keys, asked.ends, asked.tokens, hit, seconds, now)
        if self._asked:
            self._asked.pop(id(request.subject), None)
        # What is charged allows for hits that do not come true; what is told is what comes of those that are expected.
        cached = asked.ends[hit - 1] if hit else 0.0
        expected = self._cost.seconds(asked.tokens - cached, cached) * prefiller.slowness
        return Prediction(wait + expected, int(cached))

    def told(self, backend: Backend, request: PickRequest, prompt_tokens: int, cached_tokens: int | None) -> None:
        """What the backend says of the prompt."""
        if cached_tokens is not None and backend in self._prefillers:
            self._prefillers[backend].tell(id(request), prompt_tokens, cached_tokens)

    def ended(self, backend: Backend, request: PickRequest, served: bool) -> None:
        """An answer teaches how long prompts take and what is cached."""
        prefiller = self._prefillers.get(backend)
        if prefiller is None:
            return
        sample = prefiller.end(id(request), served, self.context.clock())
        if sample is not None:
            self._learn(prefiller, sample)

    def _learn(self, prefiller: Prefiller, sample: Sample) -> None:
        now = self.context.clock()
        if now >= self._next_lesson:
            self._next_lesson = now + _LESSON_SECONDS
            self._cost.learn(prefiller.backend, *sample)
            prefiller.slowness = self._cost.slowness(prefiller.backend)

    def emptied(self, backend: Backend) -> None:
        """What it had in its cache is gone."""
        if backend in self._prefillers:
            self._prefillers[backend].emptied()

    @property
    def remembered(self) -> int:
        """Of all prefillers."""
        return sum(len(prefiller.cached) for prefiller in self._prefillers.values())

    # The queue in front of all

    def has_room(self, candidates: Sequence[Candidate]) -> bool:
        """Whether a prompt that went to one of them now would begin almost at once."""
        if candidates[0].backend.role is Role.DECODE:
            return super().has_room(candidates)
        prefillers = self._known(candidates)
        loads = candidates[0].scoreboard.compute(self._seen_slots)
        if 0 in loads:
            return True
        now = self.context.clock()
        return any(map(self._is_free, candidates, prefillers, self._waits(prefillers, loads, now), loads))

    def has_room_everywhere(self, candidates: Sequence[Candidate]) -> bool:
        """Whether it would begin almost at once on any of them."""
        if candidates[0].backend.role is Role.DECODE:
            return True
        prefillers = self._known(candidates)
        loads = candidates[0].scoreboard.compute(self._seen_slots)
        if not any(loads):
            self._busy -= _BUSY_STEP * self._busy
            return True
        now = self.context.clock()
        return all(map(self._is_free, candidates, prefillers, self._waits(prefillers, loads, now), loads))

    def work_seconds(self, candidates: Sequence[Candidate], request: PickRequest) -> float:
        """What a prompt takes where it takes least; a decoder's work is not known."""
        if candidates[0].backend.role is Role.DECODE:
            return 0.0
        asked = self._wait(request)
        return min(self._own(prefiller, asked)[1] for prefiller in self._known(candidates))

    def first_to_go(self, candidates: Sequence[Candidate], waiting: Sequence[PickRequest]) -> int | None:
        """The first that is soonest done where there is room. Those before it wait for what they will be done sooner
        with, each behind those that wait for the same.
        """
        if candidates[0].backend.role is Role.DECODE:
            return 0
        prefillers = self._known(candidates)
        loads = candidates[0].scoreboard.compute(self._seen_slots)
        waits = self._waits(prefillers, loads, self.context.clock())
        self._busy += _BUSY_STEP * (1 - loads.count(0) / len(loads) - self._busy)
        free = list(map(self._is_free, candidates, prefillers, waits, loads))
        for place, request in enumerate(waiting):
            asked = self._wait(request)
            scores, near = self._scores(prefillers, waits, asked)
            best = [
                prefiller
                for prefiller, score, is_free in zip(prefillers, scores, free, strict=True)
                if is_free and score <= near
            ]
            if best:
                self._decided = request.subject or request, best
                return place
            soonest = scores.index(min(scores))
            waits[soonest] += self._own(prefillers[soonest], asked)[1]
        return None

    def _is_free(self, candidate: Candidate, prefiller: Prefiller, wait: float, load: int) -> bool:
        """Whether what it has is soon done, or so short that an engine which works on several computes more with it."""
        limit = candidate.limit
        if limit is not None and load and not candidate.has_room:
            return False
        if wait < self.ahead_seconds:
            return True
        if limit == 1:
            return False
        # What other workers have sent there is not told in tokens.
        others = max(0, load - prefiller.charge) * SECONDS_PER_LOAD / max(1e-9, self._cost.shape[1])
        return prefiller.computing + others < self.batch_tokens

    # What is known

    def _known(self, candidates: Sequence[Candidate]) -> list[Prefiller]:
        """Of each of them."""
        if candidates is not self._seen:
            self._seen = candidates
            self._seen_prefillers = [self._of(candidate.backend) for candidate in candidates]
            self._seen_slots = [candidate.backend.slot for candidate in candidates]
        journal = self.context.journal
        if journal is not None and journal.has_news:
            for prefiller, sample in hear(journal, self._by_slot):
                self._learn(prefiller, sample)
        return self._seen_prefillers

    def _of(self, backend: Backend) -> Prefiller:
        known = self._prefillers.get(backend)
        if known is None:
            known = Prefiller(backend, journal=self.context.journal)
            self._prefillers[backend] = self._by_slot[backend.slot] = known
        return known

    def _wait(self, request: PickRequest) -> _Asked:
        """What is known of a request, worked out once while it waits."""
        subject = request.subject or request
        asked = self._asked.get(id(subject))
        if asked is None or (asked.request.subject or asked.request) is not subject:
            asked = self._asked[id(subject)] = self._ask(request)
            if len(self._asked) > _MOST_ASKED:
                self._asked.popitem(last=False)
        return asked

    def _ask(self, request: PickRequest) -> _Asked:
        tokens = request.prompt_tokens
        if tokens < _LEAST_TOKENS or not (prefix := request.prefix_keys).keys:
            return _Asked(request, (), (), tokens)
        per_byte = tokens / prefix.sizes[-1]
        return _Asked(request, prefix.keys, [size * per_byte for size in prefix.sizes], tokens)

    def _own(self, prefiller: Prefiller, asked: _Asked) -> tuple[int, float]:
        """The pieces of a prompt that are probably cached there, and the seconds that the rest takes."""
        known = asked.there.get(prefiller)
        if known is None or known[0] != prefiller.version:
            if asked.request.subject is None:  # what is only passed on
                hit, seconds = 0, asked.request.prefill.compute * SECONDS_PER_LOAD
            else:
                prefixes = prefiller.cached
                hit = prefixes.hit(asked.keys)
                cached = prefixes.trust * asked.ends[hit - 1] if hit else 0.0
                seconds = self._cost.seconds(asked.tokens - cached, cached) * prefiller.slowness
            known = asked.there[prefiller] = prefiller.version, hit, seconds
        return known[1], known[2]

    def _scores(
        self, prefillers: Sequence[Prefiller], waits: Sequence[float], asked: _Asked
    ) -> tuple[list[float], float]:
        """The wait at each of them and what the prompt adds; and up to where they cannot be told from the least."""
        counts = 1 + self.crowding * min(_MOST_CROWDING, self._busy / max(1e-9, 1 - self._busy))
        if asked.keys or asked.request.subject is None:
            scores = [
                wait + counts * self._own(prefiller, asked)[1]
                for prefiller, wait in zip(prefillers, waits, strict=True)
            ]
        else:
            counts *= self._cost.seconds(asked.tokens, 0.0)
            scores = [wait + counts * prefiller.slowness for prefiller, wait in zip(prefillers, waits, strict=True)]
        least = min(scores)
        return scores, least + max(_TIE_SECONDS, _TIE_SHARE * least)

    def _waits(self, prefillers: Sequence[Prefiller], loads: Sequence[int], now: float) -> list[float]:
        """Seconds until each of them is free; 0.0: it is."""
        return [
            prefiller.left(load * SECONDS_PER_LOAD, now) if load else 0.0
            for prefiller, load in zip(prefillers, loads, strict=True)
        ]
