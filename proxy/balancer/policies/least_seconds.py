"""Least load in seconds: a prompt goes where its prefill will probably have ended first.

Load is what a backend has to do until it is free, in seconds learned from its answers, and what this prompt adds, of
which the part that is probably in its prefix cache costs nothing. That is Mooncake's Algorithm 1 (FAST'25), but for
two things: nothing is fitted offline, and what a prompt adds counts more the busier all are, because it delays those
who come after it.
"""

from __future__ import annotations

from math import inf
from operator import add
from typing import TYPE_CHECKING, Final
from zlib import crc32

from proxy.balancer.pick import CACHED_PREFIX, EQUAL, LEAST_SECONDS, Prediction
from proxy.balancer.policies.least_tokens import LeastTokens
from proxy.balancer.policies.prefill_cost import LEAST_TOKENS, SECONDS_PER_LOAD, PromptCosts, prompt_costs
from proxy.balancer.policies.prefiller import Prefiller, Prefillers
from proxy.balancer.shared.memory import AGEING
from proxy.common.backend import Load

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from proxy.balancer.pick import Candidate, Columns, PickRequest, PolicyContext
    from proxy.balancer.policies.prefill_cost import Sent
    from proxy.common.backend import Backend

    _Snapshot = tuple[Sequence[Prefiller], Sequence[float], Sequence[float], bool, Sequence[float] | None]
    """Of candidates: who they are, when they are free and what the prompt takes them, in seconds; whether several were
    equal; and the tokens that are probably cached there, None where that was not looked up."""

# Differences that predictions cannot tell.
_TIE_SHARE: Final = 0.05
_TIE_SECONDS: Final = 0.02
# Of a first turn's prompt, the pieces that another one of the same kind shares with it.
_KIND_PIECES: Final = 8
# The share of busy backends over that of idle ones, at most; and how fast the share is followed.
_MOST_CROWDING: Final = 6.0
_MOST_BUSY: Final = _MOST_CROWDING / (1 + _MOST_CROWDING)
_BUSY_STEP: Final = 0.02
# How late the event loop may be is looked at once in this time, over the seconds before.
_LAG_LOOK_SECONDS: Final = 1.0
_LAG_SECONDS: Final = 15.0
# A request waits no longer for a prefiller that computes in turn than this number of predicted waits.
_HOLD_WAITS: Final = 2.0
# In one number, a token of compute and a token of KV that no decoder has pulled yet. That takes memory and no time.
_WEIGHTS: Final = 100, 3
_SECONDS_PER_WEIGHT: Final = SECONDS_PER_LOAD / _WEIGHTS[0]
# Who is going to get a request: both, and the pieces that are cached there and the seconds that the rest takes.
_Choice = tuple["PickRequest", Prefiller, PromptCosts, int, float]


class LeastSeconds(LeastTokens):
    """For prefillers."""

    label = "least_load"
    weights = _WEIGHTS
    crowding = 1.0
    """How much a prompt's own work counts for those behind it; 0: it does not."""
    ahead_seconds = 0.05
    """A backend gets its next prompt when what it has will take no longer, and no longer than the event loop was late
    in the last seconds: that hides the way there and back."""
    batch_tokens = 16_384
    """And more together with it, up to so many tokens, where the time that this spares is worth the wait."""

    def __init__(self, context: PolicyContext | None = None) -> None:
        super().__init__(context)
        self._prefillers = Prefillers(self.context)
        self._busy = 0.0
        self._lag = 0.0  # the most seconds by which the event loop was late in the last ones
        self._lag_due = -inf  # when to look again
        self._asked: dict[int, PromptCosts] = {}  # who waits, by the subject's id
        self._waiting_seconds: dict[int, float] = {}  # what their prompts take
        self._decided: tuple[object, list[Prefiller]] | None = None  # for whom it is best to go where
        self._chosen: _Choice | None = None

    # Where it goes

    def choose(self, candidates: Sequence[Candidate], weights: Sequence[int], request: PickRequest) -> Candidate:
        """The soonest done; of those that cannot be told apart the one to which a session's prompts go, or else those
        that begin alike, or which is least loaded. That is by a hash: gateways that do not talk agree, also on what
        keys do not show, such as pictures whose addresses change.
        """
        known = self._prefillers
        prefillers = known.look_up(candidates)
        prompt = self._asked.get(id(request.subject or request)) if self._asked else None
        if prompt is None:
            prompt = prompt_costs(request)
        waits = self._waits(prefillers, weights, self.context.clock(), _SECONDS_PER_WEIGHT)
        work = known.work(prefillers, prompt)
        place, is_equal = 0, False
        if len(candidates) > 1:
            decided, among = self._decided, None
            if decided is not None and decided[0] is (request.subject or request):
                among = [prefiller in decided[1] for prefiller in prefillers]
            scores = self._scores(waits, work, among)
            place, is_equal = self._soonest(candidates, prefillers, weights, request, prompt, scores)
        self._decided = None
        hit, cached = 0, None
        if prompt.keys:
            hit, cached = prompt.by_prefiller[prefillers[place]][1], _cached_tokens(prefillers, prompt)
        self._chosen = request, prefillers[place], prompt, hit, work[place]
        self.snapshot = prefillers, waits, work, is_equal, cached
        return candidates[place]

    def _soonest(
        self,
        candidates: Sequence[Candidate],
        prefillers: Sequence[Prefiller],
        weights: Sequence[int],
        request: PickRequest,
        prompt: PromptCosts,
        scored: tuple[list[float], float],
    ) -> tuple[int, bool]:
        """Return the place of the one that is chosen of several, and whether it is as good as others.

        `scored`: what `_scores` returns.
        """
        scores, near = scored
        equal = [place for place, score in enumerate(scores) if score <= near]
        if len(equal) == 1:
            return equal[0], False
        if not prompt.keys and (prompt.tokens < LEAST_TOKENS or request.session is None):
            tied, loads = candidates, weights
            if len(equal) < len(candidates):
                tied, loads = [candidates[place] for place in equal], [weights[place] for place in equal]
            return equal[tied.index(super().choose(tied, loads, request))], True
        if prompt.keys and any(prompt.by_prefiller[prefillers[place]][1] for place in equal):
            return scores.index(min(scores)), True
        session = request.session
        if session is not None:
            kind = crc32(session.encode(errors="surrogatepass"))
        else:
            kind = prompt.keys[min(len(prompt.keys), _KIND_PIECES) - 1] & 0xFFFFFFFF
        return max(equal, key=lambda place: crc32(candidates[place].backend.name.encode(), kind)), True

    def cost_of(self, backend: Backend, request: PickRequest) -> Load:
        """The predicted seconds, in what they are in tokens."""
        return Load(round(self._choice(backend, request)[4] / SECONDS_PER_LOAD), request.prefill.kv)

    def _choice(self, backend: Backend, request: PickRequest) -> _Choice:
        """What is known of the request, and of the backend, which somebody else may have chosen."""
        chosen = self._chosen
        if chosen is None or chosen[0] is not request or chosen[1].backend is not backend:
            prefiller, prompt = self._prefillers.of(backend), prompt_costs(request)
            chosen = self._chosen = request, prefiller, prompt, *self._prefillers.own(prefiller, prompt)
        return chosen

    # What becomes of it

    def track(self, backend: Backend, request: PickRequest) -> Sent:
        """What is under way counts as cached, or a burst with one prompt would scatter."""
        _, prefiller, prompt, hit, seconds = self._choice(backend, request)
        self._chosen = None
        compute = round(seconds / SECONDS_PER_LOAD)
        sent = prefiller.send(prompt, hit, seconds, compute, request.prefill.kv, self.context.clock())
        # What is charged allows for hits that do not come true; what is told is what comes of those that are expected.
        cached = sent.cached
        expected = self._prefillers.cost.seconds(prompt.tokens - cached, cached) * prefiller.slowness
        sent.prediction = Prediction(sent.wait + expected, round(cached))
        return sent

    def reason(self, snapshot: _Snapshot, backend: Backend) -> str:
        """See Policy."""
        prefillers, waits, _, is_equal, cached = snapshot
        if cached is not None:
            place = [prefiller.backend.key for prefiller in prefillers].index(backend.key)
            soon = waits[place] + _TIE_SECONDS
            if any(wait <= soon and hit < cached[place] for wait, hit in zip(waits, cached, strict=True)):
                return CACHED_PREFIX
        return EQUAL if is_equal else LEAST_SECONDS

    def figures(self, snapshot: _Snapshot, weights: Sequence[int]) -> Columns:
        """See Policy."""
        _, waits, work, _, cached = snapshot
        columns: dict[str, Sequence[float]] = {"wait_seconds": waits, "work_seconds": work}
        if cached is not None:
            columns["cached_tokens"] = cached
        return columns, [*map(add, waits, work)]

    def forget_cache(self, backend: Backend) -> None:
        """What it had in its cache is gone."""
        self._prefillers.of(backend).forget_cache()

    def soonest_seconds(self, candidates: Sequence[Candidate], request: PickRequest) -> float | None:
        """What all have to do already, and the prompt's work."""
        prefillers = self._prefillers.look_up(candidates)
        loads = self._prefillers.reader.compute()
        waits = self._waits(prefillers, loads, self.context.clock())
        return min(map(float.__add__, waits, self._prefillers.work(prefillers, prompt_costs(request))))

    @property
    def remembered(self) -> int:
        """Of all prefillers."""
        return self._prefillers.remembered

    # The queue in front of all

    def has_room(self, candidates: Sequence[Candidate]) -> bool:
        """Whether a prompt that went to one of them now would begin almost at once."""
        return self._has_room(candidates) is not False

    def admits(self, candidates: Sequence[Candidate], request: Callable[[], PickRequest]) -> bool:
        """See Policy. Where there is room everywhere, nothing is better."""
        has_room = self._has_room(candidates)
        if has_room is None:
            return self.first_to_admit(candidates, [request()]) is not None
        return has_room

    def work_seconds(self, candidates: Sequence[Candidate], request: PickRequest) -> float:
        """What a prompt takes where it takes least. It waits from now on."""
        subject = id(request.subject or request)
        prompt = self._asked[subject] = prompt_costs(request)
        seconds = self._waiting_seconds[subject] = min(
            self._prefillers.work(self._prefillers.look_up(candidates), prompt)
        )
        return seconds

    def left_queue(self, request: PickRequest) -> None:
        """What was worked out for it is not needed any more."""
        self._asked.pop(id(request.subject or request), None)
        self._waiting_seconds.pop(id(request.subject or request), None)

    def hold_seconds(self, request: PickRequest | None, waiting: int) -> float:
        """See Policy: twice the wait that is predicted where engines compute in turn, as was learned of them.

        It is the time until a prefiller is free, the work of all that wait, and that of later, shorter prompts.
        """
        candidates, prefillers = self._prefillers.candidates, self._prefillers.prefillers
        if request is None or not prefillers:
            return inf
        loads = self._prefillers.reader.compute()
        waits = self._waits(prefillers, loads, self.context.clock())
        if any(map(self._is_free, candidates, prefillers, waits, loads)):
            return inf  # it waits for decoders
        work = min(self._prefillers.work(prefillers, prompt_costs(request)))
        return _HOLD_WAITS * (min(waits) + sum(self._waiting_seconds.values()) / len(prefillers) + work / AGEING)

    def first_to_admit(self, candidates: Sequence[Candidate], waiting: Sequence[PickRequest]) -> int | None:
        """The first that is soonest done where there is room. Those before it wait for what they will be done sooner
        with, each behind those that wait for the same.
        """
        prefillers = self._prefillers.look_up(candidates)
        loads = self._prefillers.reader.compute()
        now = self.context.clock()
        waits = self._waits(prefillers, loads, now)
        free = list(map(self._is_free, candidates, prefillers, waits, loads))
        is_open = list(map(self._has_room_in_step, prefillers))
        gathers = [
            has_room and prefiller.is_ending(now) for has_room, prefiller in zip(is_open, prefillers, strict=True)
        ]
        share = len(self._asked) / len(prefillers)
        for place, request in enumerate(waiting):
            prompt = self._asked.get(id(request.subject or request)) or prompt_costs(request)
            work = self._prefillers.work(prefillers, prompt)
            scores, near = self._scores(waits, work)
            # Nothing is gained by waiting for another prefiller where the prompt takes as long everywhere.
            is_same = max(work) <= min(work) * (1 + _TIE_SHARE)
            best = [
                prefillers[at]
                for at, score in enumerate(scores)
                if score <= near
                and (
                    free[at]
                    or (is_same and is_open[at] and prefillers[at].fits_in_step(prompt.tokens))
                    or (gathers[at] and self._joins(prefillers[at], work[at], share))
                )
            ]
            if best:
                self._decided = request.subject or request, best
                return place
            soonest = scores.index(min(scores))
            waits[soonest] += work[soonest]
        return None

    def _is_free(self, candidate: Candidate, prefiller: Prefiller, wait: float, load: int) -> bool:
        """Whether what it has is soon done; or it is not known when, so that nothing is held back from it; or it is to
        be found out whether it computes more at a time.
        """
        if not load:
            return True
        limit = candidate.limit
        if limit is not None and not candidate.has_room:
            return False
        if wait < self.ahead_seconds + self._lag:
            return True
        if limit == 1:
            return False
        concurrency = prefiller.concurrency
        if not concurrency.is_orderly:
            return True
        # Behind long prompts it would be dear to find out. Of what is only passed on, no tokens are known.
        return prefiller.uncached_tokens < self.batch_tokens * concurrency.lanes and (
            prefiller.under_way < concurrency.wanted or (prefiller.is_busy and not prefiller.uncached_tokens)
        )

    def _has_room_in_step(self, prefiller: Prefiller) -> bool:
        """Whether a prefiller computes several prompts in one step, one after the other, and has room in the next."""
        concurrency = prefiller.concurrency
        return (
            prefiller.shared_seconds > 0
            and bool(concurrency.is_orderly)
            and prefiller.behind_tokens < prefiller.step_tokens * concurrency.wanted
            and concurrency.lanes == 1
        )

    def _joins(self, prefiller: Prefiller, seconds: float, share: float) -> bool:
        """Whether a prompt had better be computed in the next step than in the one after it.

        It delays the others of that step by its tokens. It saves the time that the prompts of a step share: for itself,
        for `share` prompts that wait, and for those that will come while all are busy.
        """
        shared = prefiller.shared_seconds
        return prefiller.behind * (seconds - shared) < shared * (1 + share + self._crowding)

    # How

    def _has_room(self, candidates: Sequence[Candidate]) -> bool | None:
        """Whether all of them have room; None: some have."""
        prefillers = self._prefillers.look_up(candidates)
        loads = self._prefillers.reader.compute()
        idle = loads.count(0) / len(loads)
        self._busy += _BUSY_STEP * (1 - idle - self._busy)
        if idle == 1:
            return True
        now = self.context.clock()
        if now >= self._lag_due:
            self._lag_due = now + _LAG_LOOK_SECONDS
            lag = self.context.lag_within(now - _LAG_SECONDS, now - _LAG_LOOK_SECONDS)
            self._lag = self._lag if lag is None else lag
        waits = self._waits(prefillers, loads, now)
        free = list(map(self._is_free, candidates, prefillers, waits, loads))
        if False not in free:
            return True
        return None if True in free or any(map(self._has_room_in_step, prefillers)) else False

    @property
    def _crowding(self) -> float:
        """The prompts that will come, on the average, until a busy prefiller is idle again."""
        return self._busy / (1 - self._busy) if self._busy < _MOST_BUSY else _MOST_CROWDING

    def _scores(
        self, waits: Sequence[float], work: Sequence[float], among: Sequence[bool] | None = None
    ) -> tuple[list[float], float]:
        """The wait at each and what the prompt's work adds; and up to where they cannot be told from the least.

        `among`: which of them come into question, if any does; None: all. The score of the others is infinite.
        """
        counts = 1 + self.crowding * self._crowding
        scores = [wait + counts * work[place] for place, wait in enumerate(waits)]
        if among is not None and True in among:
            scores = [score if is_among else inf for score, is_among in zip(scores, among, strict=True)]
        least = min(scores)
        return scores, least + max(_TIE_SHARE * least, min(_TIE_SECONDS, 2 * _TIE_SHARE * least))

    def _waits(
        self, prefillers: Sequence[Prefiller], loads: Sequence[int], now: float, unit: float = SECONDS_PER_LOAD
    ) -> list[float]:
        """Seconds until each of them is free; 0.0: it is. `unit`: the seconds that one of a load stands for."""
        waits = [0.0] * len(loads)
        if any(loads):
            for place, load in enumerate(loads):
                if load:
                    waits[place] = prefillers[place].left(load * unit, now)
        return waits


def _cached_tokens(prefillers: Sequence[Prefiller], prompt: PromptCosts) -> Sequence[float]:
    """Of the prompt, that are probably cached at each of these."""
    ends, there = prompt.ends, prompt.by_prefiller
    return [ends[pieces - 1] if (pieces := there[prefiller][1]) else 0.0 for prefiller in prefillers]
