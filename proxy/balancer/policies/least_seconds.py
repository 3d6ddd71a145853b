"""Policy `least_load` for prefillers: a prompt goes to the backend whose prefill will probably end first.

The score of a backend is the time until it is free plus the prefill time of this prompt, both in seconds and learned
from answers. Tokens that are probably in its prefix cache cost nothing. This is Mooncake's Algorithm 1 (FAST'25) with
two differences. Nothing is fitted offline. And the prefill time counts more the busier all prefillers are, because it
delays later prompts.
"""

from __future__ import annotations

from math import inf
from operator import add
from typing import TYPE_CHECKING, Final
from zlib import crc32

from proxy.balancer.pick import CACHED_PREFIX, EQUAL, LEAST_SECONDS, WORKING_SET, Prediction
from proxy.balancer.policies.least_tokens import LeastTokens
from proxy.balancer.policies.prefill_cost import MIN_CACHED_PROMPT_TOKENS, SECONDS_PER_LOAD, PromptCosts, prompt_costs
from proxy.balancer.policies.prefiller import Prefiller, Prefillers
from proxy.balancer.shared.memory import AGEING
from proxy.common.backend import Load

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from proxy.balancer.pick import Candidate, Columns, PickRequest, PolicyContext, Subject
    from proxy.balancer.policies.prefill_cost import Sent
    from proxy.balancer.policies.working_sets import Session
    from proxy.common.backend import Backend

    _Snapshot = tuple[Sequence[Prefiller], Sequence[float], Sequence[float], bool, Sequence[float] | None, bool]
    """The prefillers, their waits and prefill times in seconds, whether several were equal, the probably cached tokens
    of each (None: the cache was not looked up), and whether the request has waited for its session."""

# Scores are equal if they differ by less than this share and this time, which is the precision of predictions.
_TIE_SHARE: Final = 0.05
_TIE_SECONDS: Final = 0.02
# Number of leading pieces of a first turn that identify its kind, such as a common system prompt.
_KIND_PIECES: Final = 8
# Upper bound of the ratio of busy to idle backends, and the share of busy ones at this bound.
_MAX_CROWDING: Final = 6.0
_MAX_BUSY: Final = _MAX_CROWDING / (1 + _MAX_CROWDING)
# Weight of a new value in the mean share of busy backends.
_BUSY_STEP: Final = 0.02
# The lag of the event loop is updated at this interval. It is the maximum over the time below.
_LAG_LOOK_SECONDS: Final = 1.0
_LAG_SECONDS: Final = 15.0
# Maximum time that a request waits for a busy prefiller, as a multiple of its predicted wait.
_HOLD_WAITS: Final = 2.0
# Weights of a token of compute, and of a token of KV that no decoder has pulled yet, which takes memory and no time.
_WEIGHTS: Final = 100, 3
_SECONDS_PER_WEIGHT: Final = SECONDS_PER_LOAD / _WEIGHTS[0]
# Request, chosen prefiller, costs of the prompt, number of cached pieces, and prefill time in seconds.
_Choice = tuple["PickRequest", Prefiller, PromptCosts, int, float]


class LeastSeconds(LeastTokens):
    """Policy `least_load` for prefillers."""

    label = "least_load"
    weights = _WEIGHTS
    crowding = 1.0
    """Weight of the delay of later prompts. 0: it does not count."""
    ahead_seconds = 0.05
    """Send the next prompt once less than this, plus the recent lag of the event loop, is left to compute. That hides
    the round trip."""
    batch_tokens = 16_384
    """Maximum uncached tokens on a backend while pdproxy tests whether it computes several prompts at a time."""

    def __init__(self, context: PolicyContext | None = None) -> None:
        super().__init__(context)
        self._prefillers = Prefillers(self.context)
        self.working_sets = self._sets = self._prefillers.working_sets
        self._busy = 0.0
        self._lag = 0.0  # maximum recent lag of the event loop, in seconds
        self._lag_due = -inf  # time of the next update of `_lag`
        self._waiting: dict[int, PromptCosts] = {}  # costs of waiting prompts, by the ID of the subject
        self._waiting_seconds: dict[int, float] = {}  # prefill times of waiting prompts, by the same ID
        self._decided: tuple[object, list[Prefiller]] | None = None  # admitted subject and its best prefillers
        self._chosen: _Choice | None = None
        self._waited: Subject | None = None  # subject that left the queue last

    # Choice

    def choose(self, candidates: Sequence[Candidate], weights: Sequence[int], request: PickRequest) -> Candidate:
        """Return the candidate that completes the prompt first.

        Among equal candidates, a hash of the session or of the beginning of the prompt selects one. So gateways choose
        alike without sharing state, also if keys differ, for example because the URL of an image changes. Short prompts
        and prompts without a session and keys go to the least loaded candidate.
        """
        prefillers = self._prefillers.look_up(candidates)
        prompt = self._waiting.get(id(request.subject or request)) if self._waiting else None
        if prompt is None:
            prompt = prompt_costs(request)
        waits = self._waits(prefillers, weights, self.context.clock(), _SECONDS_PER_WEIGHT)
        work = self._prefillers.work(prefillers, prompt)
        place, is_equal, has_waited = 0, False, False
        session = self._resident(prompt, request) if self._sets.is_active else None
        if session is not None:
            has_waited = session.is_placed
        if len(candidates) > 1:
            decided, among = self._decided, None
            if session is not None:
                among = [prefiller.cached is session.cache for prefiller in prefillers]
            elif decided is not None and decided[0] is (request.subject or request):
                among = [prefiller in decided[1] for prefiller in prefillers]
            scores = self._scores(self._with_handoffs(candidates, waits, prompt), work, among)
            place, is_equal = self._soonest(candidates, prefillers, weights, request, prompt, scores)
        self._decided = None
        hit, cached = 0, None
        if prompt.keys:
            hit, cached = prompt.by_prefiller[prefillers[place]][1], _cached_tokens(prefillers, prompt)
        self._chosen = request, prefillers[place], prompt, hit, work[place]
        self.snapshot = prefillers, waits, work, is_equal, cached, has_waited
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
        """Return the index of the chosen candidate, and whether others are equal. `scored`: result of `_scores`."""
        scores, near = scored
        equal = [place for place, score in enumerate(scores) if score <= near]
        if len(equal) == 1:
            return equal[0], False
        if not prompt.keys and (prompt.tokens < MIN_CACHED_PROMPT_TOKENS or request.session is None):
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
        """Return the predicted prefill time, converted to tokens, and the KV of the prompt."""
        return Load(round(self._choice(backend, request)[4] / SECONDS_PER_LOAD), request.prefill.kv)

    def _choice(self, backend: Backend, request: PickRequest) -> _Choice:
        """Return the last choice, or compute it if the pool has chosen this backend without the policy."""
        chosen = self._chosen
        if chosen is None or chosen[0] is not request or chosen[1].backend is not backend:
            prefiller, prompt = self._prefillers.of(backend), prompt_costs(request)
            chosen = self._chosen = request, prefiller, prompt, *self._prefillers.own(prefiller, prompt)
        return chosen

    # Outcome

    def track(self, backend: Backend, request: PickRequest) -> Sent:
        """Note that the prompt was sent. It counts as cached at once, or a burst of equal prompts would scatter."""
        _, prefiller, prompt, hit, seconds = self._choice(backend, request)
        self._chosen = None
        compute = round(seconds / SECONDS_PER_LOAD)
        now = self.context.clock()
        sent = prefiller.send(prompt, hit, seconds, compute, request.prefill.kv, now)
        if prompt.keys:
            has_waited, self._waited = self._waited is not None and self._waited is request.subject, None
            sent.resident_tokens = self._sets.note_sent(prefiller.cached, prompt, request.session, sent, has_waited)
        # The charge allows for expected cache hits that fail. The reported prediction does not.
        cached = sent.cached
        expected = self._prefillers.cost.seconds(prompt.tokens - cached, cached) * prefiller.slowness
        sent.prediction = Prediction(sent.wait + expected, round(cached))
        return sent

    def reason(self, snapshot: _Snapshot, backend: Backend) -> str:
        """See Policy."""
        prefillers, waits, _, is_equal, cached, has_waited = snapshot
        if has_waited:
            return WORKING_SET
        if cached is not None:
            place = [prefiller.backend.key for prefiller in prefillers].index(backend.key)
            soon = waits[place] + _TIE_SECONDS
            if any(wait <= soon and hit < cached[place] for wait, hit in zip(waits, cached, strict=True)):
                return CACHED_PREFIX
        return EQUAL if is_equal else LEAST_SECONDS

    def figures(self, snapshot: _Snapshot, weights: Sequence[int]) -> Columns:
        """See Policy."""
        _, waits, work, _, cached, _ = snapshot
        columns: dict[str, Sequence[float]] = {"wait_seconds": waits, "work_seconds": work}
        if cached is not None:
            columns["cached_tokens"] = cached
        return columns, [*map(add, waits, work)]

    def forget_cache(self, backend: Backend) -> None:
        """See Policy."""
        prefiller = self._prefillers.of(backend)
        prefiller.forget_cache()
        self._sets.forget(prefiller.cached)

    def soonest_seconds(self, candidates: Sequence[Candidate], request: PickRequest) -> float | None:
        """Return the least sum of a prefiller's wait and its prefill time for the prompt."""
        prefillers = self._prefillers.look_up(candidates)
        loads = self._prefillers.reader.compute()
        waits = self._waits(prefillers, loads, self.context.clock())
        return min(map(float.__add__, waits, self._prefillers.work(prefillers, prompt_costs(request))))

    def working_set(self, backend: Backend) -> Mapping[str, float]:
        """See Policy."""
        home = self._sets.sets.get(self._prefillers.of(backend).cached)
        if home is None:
            return {}
        return {"used": home.used_tokens} | ({"limit": home.limit} if home.limit < inf else {})

    @property
    def remembered_prefixes(self) -> int:
        """See Policy."""
        return sum(len(prefiller.cached) for prefiller in self._prefillers.by_key.values())

    # Queue

    def has_room(self, candidates: Sequence[Candidate]) -> bool:
        """Return whether a candidate would begin with a prompt almost at once."""
        return self._has_room(candidates) is not False

    def admits(self, candidates: Sequence[Candidate], request: Callable[[], PickRequest]) -> bool:
        """See Policy. If all candidates have room, there is nothing to wait for."""
        has_room = self._has_room(candidates)
        if has_room is None:
            return self.first_to_admit(candidates, [request()]) is not None
        return has_room

    def work_seconds(self, candidates: Sequence[Candidate], request: PickRequest) -> float:
        """See Policy."""
        subject = id(request.subject or request)
        prompt = self._waiting[subject] = prompt_costs(request)
        self._sets.note_waiting(prompt.keys, request.session, self.context.clock())
        seconds = self._waiting_seconds[subject] = min(
            self._prefillers.work(self._prefillers.look_up(candidates), prompt)
        )
        return seconds

    def left_queue(self, request: PickRequest) -> None:
        """Drop the costs of the prompt."""
        self._waited = request.subject
        prompt = self._waiting.pop(id(request.subject or request), None)
        if prompt is not None:
            self._sets.note_left(prompt.keys, request.session, self.context.clock())
        self._waiting_seconds.pop(id(request.subject or request), None)

    def hold_seconds(self, request: PickRequest | None, waiting: int) -> float:
        """Return twice the predicted wait, if engines were learned to compute prompts in order.

        The wait is the time until a prefiller is free, plus the work of all waiting prompts and of later, shorter ones.
        """
        candidates, prefillers = self._prefillers.candidates, self._prefillers.prefillers
        if request is None or not prefillers:
            return inf
        loads = self._prefillers.reader.compute()
        waits = self._waits(prefillers, loads, self.context.clock())
        if any(map(self._is_free, candidates, prefillers, waits, loads)):
            return inf  # the request waits for decoders
        work = min(self._prefillers.work(prefillers, prompt_costs(request)))
        return _HOLD_WAITS * (min(waits) + sum(self._waiting_seconds.values()) / len(prefillers) + work / AGEING)

    def first_to_admit(self, candidates: Sequence[Candidate], waiting: Sequence[PickRequest]) -> int | None:
        """Return the index of the first request whose best prefiller has room.

        The requests before it wait for other prefillers. The work of each counts for those that wait behind it.
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
        share = len(self._waiting) / len(prefillers)
        for place, request in enumerate(waiting):
            prompt = self._waiting.get(id(request.subject or request)) or prompt_costs(request)
            work = self._prefillers.work(prefillers, prompt)
            scores, near = self._scores(self._with_handoffs(candidates, waits, prompt), work)
            # If the prompt takes equally long everywhere, waiting for another prefiller gains nothing.
            is_same = max(work) <= min(work) * (1 + _TIE_SHARE)
            session = self._resident(prompt, request) if self._sets.is_active else None
            best = [
                prefillers[at]
                for at, score in enumerate(scores)
                if (score <= near if session is None else prefillers[at].cached is session.cache)
                and (
                    free[at]
                    or (is_same and is_open[at] and prefillers[at].fits_in_step(prompt.tokens))
                    or (gathers[at] and self._should_join_next_step(prefillers[at], work[at], share))
                )
            ]
            if best:
                self._decided = request.subject or request, best
                return place
            soonest = scores.index(min(scores))
            waits[soonest] += work[soonest]
        return None

    def _resident(self, prompt: PromptCosts, request: PickRequest) -> Session | None:
        """Return the session of a prompt if it is a resident of one of the candidates."""
        session = self._sets.find(prompt.keys, request.session, self.context.clock())
        if session is None or not session.is_resident:
            return None
        return session if any(each.cached is session.cache for each in self._prefillers.prefillers) else None

    def _is_free(self, candidate: Candidate, prefiller: Prefiller, wait: float, load: int) -> bool:
        """Return whether a prefiller may get the next prompt.

        It may if its work is nearly done, if its order of prompts is unknown, so that nothing is held back from it, or
        to test whether it computes several prompts at a time.
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
        # The test would be expensive behind long prompts. The tokens of passed-through requests are unknown.
        return prefiller.uncached_tokens < self.batch_tokens * concurrency.lanes and (
            prefiller.in_flight < concurrency.target_in_flight or (prefiller.is_busy and not prefiller.uncached_tokens)
        )

    def _has_room_in_step(self, prefiller: Prefiller) -> bool:
        """Return whether a prefiller computes in steps of several prompts, in order, and the next one has room."""
        concurrency = prefiller.concurrency
        return (
            prefiller.shared_seconds > 0
            and bool(concurrency.is_orderly)
            and prefiller.behind_tokens < prefiller.step_tokens * concurrency.target_in_flight
            and concurrency.lanes == 1
        )

    def _should_join_next_step(self, prefiller: Prefiller, seconds: float, share: float) -> bool:
        """Return whether a prompt should join the next step rather than the one after it.

        The cost: the prompts of the next step wait for this prompt's own time. The gain: one step less, whose shared
        time is saved for this prompt, for the `share` of waiting prompts, and for the prompts that arrive meanwhile.
        """
        shared = prefiller.shared_seconds
        return prefiller.behind * (seconds - shared) < shared * (1 + share + self._expected_arrivals)

    # Scores

    def _has_room(self, candidates: Sequence[Candidate]) -> bool | None:
        """Return whether all candidates have room. None: some of them have."""
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
    def _expected_arrivals(self) -> float:
        """Expected number of prompts that arrive before a busy prefiller is idle again."""
        return self._busy / (1 - self._busy) if self._busy < _MAX_BUSY else _MAX_CROWDING

    def _scores(
        self, waits: Sequence[float], work: Sequence[float], among: Sequence[bool] | None = None
    ) -> tuple[list[float], float]:
        """Return the score of each prefiller, and the highest score that counts as equal to the lowest.

        `among`: which prefillers may be chosen; the score of the others is infinite. None, or none of them: all may.
        """
        counts = 1 + self.crowding * self._expected_arrivals
        scores = [wait + counts * work[place] for place, wait in enumerate(waits)]
        if among is not None and True in among:
            scores = [score if is_among else inf for score, is_among in zip(scores, among, strict=True)]
        least = min(scores)
        return scores, least + max(_TIE_SHARE * least, min(_TIE_SECONDS, 2 * _TIE_SHARE * least))

    def _with_handoffs(
        self, candidates: Sequence[Candidate], waits: Sequence[float], prompt: PromptCosts
    ) -> Sequence[float]:
        """Return the waits, with the additional time of handoffs from prefillers all of whose links are slow."""
        handoffs = self.context.handoffs
        if handoffs is None or not handoffs.far:
            return waits
        backends = [candidate.backend for candidate in candidates]
        return list(map(add, waits, handoffs.least_extra_seconds(backends, round(prompt.tokens))))

    def _waits(
        self, prefillers: Sequence[Prefiller], loads: Sequence[int], now: float, unit: float = SECONDS_PER_LOAD
    ) -> list[float]:
        """Return the time until each prefiller is free, in seconds. `unit`: seconds per unit of `loads`."""
        waits = [0.0] * len(loads)
        if any(loads):
            for place, load in enumerate(loads):
                if load:
                    waits[place] = prefillers[place].left(load * unit, now)
        return waits


def _cached_tokens(prefillers: Sequence[Prefiller], prompt: PromptCosts) -> Sequence[float]:
    """Return the tokens of a prompt that are probably cached on each prefiller."""
    ends, there = prompt.ends, prompt.by_prefiller
    return [ends[pieces - 1] if (pieces := there[prefiller][1]) else 0.0 for prefiller in prefillers]
