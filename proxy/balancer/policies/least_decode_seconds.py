"""Least load in seconds, for decoders: an answer goes where it and those that are being written there lose least time.

How long a token takes with so many streams is learned from answers (decode_pace). A decoder gets no more streams than
it had when it made most tokens a second: requests wait in the gateway's queue instead.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import zip_longest
from typing import TYPE_CHECKING, Final

from proxy.backend import Load
from proxy.balancer.choice import EQUAL, LEAST_SECONDS
from proxy.balancer.pick import Tracker
from proxy.balancer.policies.decode_pace import PLACES, SIZES, TRUSTED_SECONDS, DecodePace
from proxy.balancer.policies.least_tokens import LeastTokens
from proxy.balancer.shared.scoreboard import SlotReader
from proxy.balancer.slow_start import FULL

if TYPE_CHECKING:
    from collections.abc import Sequence

    from proxy.backend import Backend
    from proxy.balancer.choice import Columns
    from proxy.balancer.pick import Candidate, PickRequest, PolicyContext

    _Written = tuple[str, Sequence[float], Sequence[float], int, float]
    """Of an answer: its decoder's name, what that had `spent` as it began and as it ended, its tokens, its end."""
    _Noted = tuple[Sequence[int], Sequence[float], bool]
    """Of candidates: the answers that they write; what a token more of each takes; and whether several were equal."""

# What was learned is taken for choosing now and then, and nobody asks for it before. Of so many answers something is
# learned at once, as that of many takes the processor a fraction of what that of one does among all else.
_LOOK_SECONDS: Final = 1.0
_MOST_WRITTEN: Final = 64
# The KV that a stream holds counts as this part of a stream, where it holds as much as the others do: among equals
# those that hold less are chosen.
_KV_SHARE: Final = 0.1
# What can be told apart no longer.
_TIE: Final = 1e-3
_BELOW: Final = 1 - _TIE
_AS_GOOD: Final = 1 + _TIE
# Only where all have what they should have at most.
_FULL_SCORE: Final = 1e6
# An answer shorter than this tells little of how fast the next will be.
_LEAST_TOKENS: Final = 8
# Answers' lengths are told apart by their limits, in powers of two.
_LENGTHS: Final = 20  # what is learned is of no more than so many
_ENOUGH_LENGTHS: Final = 8
_HELD_STEP: Final = 0.05
# Of a decoder's KV memory what its answers will have in their ends, which do not come all at once, those whose prompts
# are still computed included: until they come others have ended.
_FULL: Final = 1.2
_ANY: Final = float("inf")


@dataclass(slots=True, eq=False)
class _Decoder:
    """What one does."""

    at: float
    """Until when `spent` is told."""
    spent: list[float] = field(default_factory=list)
    """Seconds in each bucket of streams, up to the last one in which there are any."""
    writing: int = 0
    """Answers, of this worker."""


class _Answer(Tracker):
    """One that is to be written."""

    __slots__ = ("backend", "before", "request", "_decoder", "_policy")

    def __init__(
        self, compute: int, kv: int, policy: LeastDecodeSeconds, backend: Backend, request: PickRequest
    ) -> None:
        self.compute = compute
        self.kv = kv
        self.backend = backend
        self.request = request
        self.before: Sequence[float] = ()
        """What its decoder had `spent` as it began."""
        self._policy = policy
        self._decoder: _Decoder | None = None  # once it has begun

    def began(self) -> None:
        """See Tracker."""
        decoder = self._decoder = self._policy.begin(self.backend)
        self.before = decoder.spent.copy()

    def ended(self, served: bool, answer_tokens: int | None) -> None:
        """See Tracker."""
        if self._decoder is not None:
            self._policy.end(self, self._decoder, answer_tokens if served else None)


@dataclass(slots=True, eq=False)
class _Bounds:
    """What is learned, and told by engines, of candidates, each in its place."""

    reader: SlotReader
    streams: list[float]
    """The most that they should have."""
    kv: list[float]
    """The most KV tokens that they should hold."""
    slowness: list[float]
    has_kv: bool = False
    is_open: bool = False
    """None of them has any bound."""

    def __post_init__(self) -> None:
        self.has_kv = min(self.kv, default=_ANY) < _ANY
        self.is_open = not self.has_kv and min(self.streams, default=_ANY) == _ANY


class LeastDecodeSeconds(LeastTokens):
    """For decoders."""

    label = "least_load"

    def __init__(self, context: PolicyContext | None = None) -> None:
        super().__init__(context)
        self.pace = DecodePace()
        self._decoders: dict[str, _Decoder] = {}  # by their names, which are hashed sooner
        self._written: list[_Written] = []  # answers of which nothing was learned yet
        self._lengths: dict[int, tuple[float, int]] = {}  # mean and number, by the limit's bit length
        self._held = 0.0  # KV tokens that a stream is charged with, lately
        self._candidates: Sequence[Candidate] = ()
        self._bounds: _Bounds  # of these
        self._due = 0.0  # when to look again

    def choose(self, candidates: Sequence[Candidate], weights: Sequence[int], request: PickRequest) -> Candidate:
        """The one where a token then takes least, all that are written there taken together; of equal ones in turn."""
        bounds = self._bounds if candidates is self._candidates else self._bounds_of(candidates)
        running = bounds.reader.running()
        held = sum(weights) / (sum(running) or 1) or 1.0
        pace, share = self.pace, _KV_SHARE / held
        slope, step = 2 * pace.slope, pace.step + pace.slope
        slowness, is_open = bounds.slowness, bounds.is_open
        least = _ANY
        equal: list[Candidate] = []
        seconds: list[float] = []
        for place, candidate in enumerate(candidates):
            streams, weight, percent = running[place], weights[place], candidate.share_percent
            load = streams + share * weight
            score = (step + slope * load) * slowness[place]
            seconds.append(score)
            if percent != FULL:
                load = (load + 1) * FULL / percent - 1
                score = (step + slope * load) * slowness[place]
            if not is_open and self._is_full(bounds, place, streams, weight):
                score += _FULL_SCORE
            if score < least * _BELOW:
                least, equal = score, [candidate]
            elif score <= least * _AS_GOOD:
                equal.append(candidate)
        is_equal = len(equal) > 1
        self.noted = running, seconds, is_equal
        return self._take_turn(equal) if is_equal else equal[0]

    def reason(self, noted: _Noted, backend: Backend) -> str:
        """See Policy."""
        return EQUAL if noted[-1] else LEAST_SECONDS

    def figures(self, noted: _Noted, weights: Sequence[int]) -> Columns:
        """See Policy."""
        running, seconds, _ = noted
        return {"running": running, "token_seconds": seconds}, seconds

    def has_room(self, candidates: Sequence[Candidate]) -> bool:
        """Whether one of them is below its knee, and has KV memory for an answer more."""
        if candidates is not self._candidates:
            self._look(candidates)
        bounds = self._bounds
        if bounds.is_open:
            return True
        return self._has_free(bounds)

    def _has_free(self, bounds: _Bounds) -> bool:
        running = bounds.reader.running()
        held = bounds.reader.weights(0, 1) if bounds.has_kv else running
        both = enumerate(zip(running, held, strict=True))
        return not all(self._is_full(bounds, place, streams, tokens) for place, (streams, tokens) in both)

    def most_running(self, backend: Backend) -> int | None:
        """Those at its knee."""
        return None if self.pace.most == _ANY else int(self.pace.most)

    def cost_of(self, backend: Backend, request: PickRequest) -> Load:
        """The prompt's KV, and what the answer will probably add to it."""
        return Load(request.decode.compute, self._kv_of(request))

    def _kv_of(self, request: PickRequest) -> int:
        limit = 0 if request.subject is None else request.subject.output_tokens
        kv = request.decode.kv
        known = self._lengths.get(limit.bit_length())
        if known is not None and known[1] >= _ENOUGH_LENGTHS:
            likely = round(known[0])
            if likely < limit:
                kv += likely - limit
        self._held += _HELD_STEP * (kv - self._held) if self._held else kv
        return kv

    def work_seconds(self, candidates: Sequence[Candidate], request: PickRequest) -> float:
        """What the answer takes of a decoder that makes as many tokens as it can; 0: not known."""
        limit = request.output_tokens
        mean, number = self._lengths.get(limit.bit_length(), (0.0, 0))
        return self.pace.token_seconds * (limit if number < _ENOUGH_LENGTHS else min(limit, mean))

    def track(self, backend: Backend, request: PickRequest) -> _Answer:
        """See Policy."""
        return _Answer(request.decode.compute, self._kv_of(request), self, backend, request)

    def begin(self, backend: Backend) -> _Decoder:
        """A decoder writes one more answer."""
        now = self.context.clock()
        decoder = self._decoders.get(backend.name)
        if decoder is None:
            decoder = self._decoders[backend.name] = _Decoder(now)
        self._pass(backend, decoder, now)
        decoder.writing += 1
        return decoder

    def end(self, answer: _Answer, decoder: _Decoder, tokens: int | None) -> None:
        """It writes one less. What is complete teaches; its tokens are None if it is not, or nobody knows them."""
        now, backend = self.context.clock(), answer.backend
        self._pass(backend, decoder, now)
        decoder.writing -= 1
        if tokens:
            subject = answer.request.subject
            if subject is not None:
                length = subject.output_tokens.bit_length()
                mean, number = self._lengths.get(length, (0.0, 0))
                if number < _LENGTHS:
                    number += 1
                self._lengths[length] = mean + 1 / number * (tokens - mean), number
            if tokens >= _LEAST_TOKENS:
                self._written.append((backend.name, answer.before, decoder.spent.copy(), tokens, now))
                if len(self._written) >= _MOST_WRITTEN:
                    self._learn()
        if now >= self._due:
            self._look(self._candidates)

    def _is_full(self, bounds: _Bounds, place: int, running: int, held: int) -> bool:
        """Whether one more is too much for a candidate that has so many answers, charged with so many KV tokens."""
        return running >= bounds.streams[place] or (running > 0 and held + self._held > bounds.kv[place])

    def _pass(self, backend: Backend, decoder: _Decoder, now: float) -> None:
        """It has written as many answers as it does, until now."""
        if streams := decoder.writing:
            if self.context.elsewhere is not None:
                streams += self.context.elsewhere(backend)
            place, spent = PLACES[streams] if streams < len(PLACES) else len(SIZES) - 1, decoder.spent
            if place >= len(spent):
                spent += [0.0] * (place + 1 - len(spent))
            spent[place] += now - decoder.at
        decoder.at = now

    def _look(self, candidates: Sequence[Candidate]) -> None:
        """Take what was learned for choosing among these from now on."""
        now = self.context.clock()
        self._due = now + _LOOK_SECONDS
        self._learn()
        self.pace.look(now)
        present = {candidate.backend.name for candidate in candidates}
        for name in [name for name, known in self._decoders.items() if name not in present and not known.writing]:
            del self._decoders[name]
            self.pace.forget(name)
        if candidates:
            self._candidates, self._bounds = candidates, self._bounds_of(candidates)

    def _learn(self) -> None:
        """Of answers that have ended, in their order."""
        written, self._written = self._written, []
        for name, began, ended, tokens, at in written:
            both = zip_longest(began, ended, fillvalue=0.0)
            spent = [(place, after - was) for place, (was, after) in enumerate(both) if after > was]
            self.pace.learn(name, spent, tokens - 1, at)

    def _bounds_of(self, candidates: Sequence[Candidate]) -> _Bounds:
        pace = self.pace
        most = [pace.most] * len(candidates)
        most[int(self._due / TRUSTED_SECONDS) % len(most)] = pace.scout
        backends = [candidate.backend for candidate in candidates]
        facts = [self.context.facts(backend) for backend in backends]
        return _Bounds(
            reader=SlotReader(candidates[0].scoreboard, [backend.slot for backend in backends]),
            streams=[
                bound if candidate.limit is None else min(bound, candidate.limit)
                for candidate, bound in zip(candidates, most, strict=True)
            ],
            kv=[_ANY if each is None or each.kv_tokens is None else _FULL * each.kv_tokens for each in facts],
            slowness=[pace.slowness(backend.name) for backend in backends],
        )
