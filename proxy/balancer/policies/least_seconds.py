"""Policy `least_load` for prefillers: a prompt goes to the backend whose prefill will probably end first.

The score of a backend is the time until it is free plus the prefill time of this prompt, both in seconds and learned
from answers. Tokens that are probably in its prefix cache cost nothing. This is Mooncake's Algorithm 1 (FAST'25) with
two differences. Nothing is fitted offline. And the prefill time counts more the busier all prefillers are, because it
delays later prompts.
"""

from __future__ import annotations

from math import inf
from operator import add
from typing import TYPE_CHECKING, Final, NamedTuple
from zlib import crc32

from proxy.balancer.pick import CACHED_PREFIX, EQUAL, LEAST_SECONDS, WORKING_SET, Prediction
from proxy.balancer.policies.least_tokens import LeastTokens
from proxy.balancer.policies.prefill_cost import MIN_CACHED_PROMPT_TOKENS, SECONDS_PER_LOAD, PromptCosts, prompt_costs
from proxy.balancer.policies.prefiller import Prefiller, Prefillers
from proxy.balancer.shared.memory import AGEING
from proxy.common.backend import Load

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence, Set

    from proxy.balancer.pick import Candidate, Columns, PickRequest, PolicyContext, Subject
    from proxy.balancer.policies.prefill_cost import Sent
    from proxy.common.backend import Backend

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
# Number of idle prefillers in the figures of a choice.
_SHOWN_IDLE: Final = 8
# Request, chosen prefiller, costs of the prompt, number of cached pieces, and prefill time in seconds.
_Choice = tuple["PickRequest", Prefiller, PromptCosts, int, float]


class _Scores:
    """Scores of prefillers for one prompt. The lists have the same order.

    The prefillers that have work or may have the prefix are scored one by one. All others differ only in their speed,
    so the fastest of them stand for these at the end of the lists.
    """

    __slots__ = ("admitted", "count", "counts", "near", "places", "plain", "scores", "waits", "work")

    def __init__(self, places: list[int], waits: list[float], plain: float, counts: float) -> None:
        self.places = places
        """Places of the prefillers."""
        self.waits = waits
        """Seconds until each of them is free."""
        self.work: list[float] = []
        """Prefill times in seconds."""
        self.scores: list[float] = []
        self.count = len(places)
        """Number of prefillers that are scored one by one."""
        self.plain = plain
        """Prefill time without the prefix on a prefiller of normal speed."""
        self.counts = counts
        """Weight of the prefill time in a score."""
        self.near = 0.0
        """The highest score that counts as equal to the lowest."""
        self.admitted: _Scores | None = None
        """Scores by which the request has left the queue: only the prefillers that were near may be chosen. None: it
        was not in the queue."""

    @property
    def has_idle(self) -> bool:
        """Whether a prefiller that is not scored one by one is as good as the best one."""
        return len(self.scores) > self.count and self.scores[self.count] <= self.near

    def takes_idle(self, slowness: float) -> bool:
        """Return whether a prefiller of this slowness that is not scored one by one is as good as the best one."""
        is_near = self.counts * (self.plain * slowness) <= self.near
        return is_near and (self.admitted is None or self.admitted.takes_idle(slowness))

    def index_of_least(self) -> int:
        """Return the index of the lowest score; of equal ones, that of the first place."""
        least = min(self.scores)
        found = self.scores.index(least)
        for index in range(found + 1, len(self.scores)):
            if self.scores[index] == least and self.places[index] < self.places[found]:
                found = index
        return found


class _Admitted(NamedTuple):
    """A request that left the queue for its best prefillers."""

    subject: object
    prefillers: Sequence[Prefiller]
    """The prefillers by place."""
    best: Set[int]
    """Places of the best ones of those that were scored one by one."""
    scores: _Scores


# The scores, the index of the chosen prefiller in them, whether several were equal, the probably cached tokens of each
# (None: the cache was not looked up), and whether the request has waited for its session.
_Snapshot = tuple[_Scores, int, bool, "Sequence[float] | None", bool]


class LeastSeconds(LeastTokens):
    """The policy `least_load` for prefillers.

    It scores those that have work or may have the prefix, and the fastest idle ones. So a choice does not cost more in
    a larger fleet, except between equal prefillers for a long prompt without a hit.
    """

    label = "least_load"
    keeps_weights = False
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
        self._prefillers = Prefillers(self.context, _WEIGHTS)
        self.working_sets = self._sets = self._prefillers.working_sets
        self._busy = 0.0
        self._lag = 0.0  # maximum recent lag of the event loop, in seconds
        self._lag_due = -inf  # time of the next update of `_lag`
        self._waiting: dict[int, PromptCosts] = {}  # costs of waiting prompts, by the ID of the subject
        self._waiting_seconds: dict[int, float] = {}  # prefill times of waiting prompts, by the same ID
        self._admitted: _Admitted | None = None  # the request that was admitted last, until it is sent
        self._chosen: _Choice | None = None
        self._waited: Subject | None = None  # subject that left the queue last

    # Choice

    def choose(self, candidates: Sequence[Candidate], weights: Sequence[int], request: PickRequest) -> Candidate:
        """Return the candidate that completes the prompt first.

        Among equal candidates, a hash of the session or of the beginning of the prompt selects one. So gateways choose
        alike without sharing state, also if keys differ, for example because the URL of an image changes. Short prompts
        and prompts without a session and keys go to the least loaded candidate.
        """
        known = self._prefillers
        prefillers = known.look_up(candidates)
        prompt = self._waiting.get(id(request.subject or request)) if self._waiting else None
        if prompt is None:
            prompt = prompt_costs(request)
        # Raised weights are those of all candidates, so all are scored one by one.
        places, reader = known.reader.places, known.reader
        if weights is reader.weights and not reader.are_few:
            places = reader.places_to_score()
        now, unit = self.context.clock(), _SECONDS_PER_WEIGHT
        waits = [prefillers[each].left(weights[each] * unit, now) if weights[each] else 0.0 for each in places]
        scores = self._scores(prompt, places, waits)
        place, is_equal, has_waited = 0, False, False
        home = self._home(prompt, request) if self._sets.is_active else None
        if home is not None:
            place, has_waited = home
        elif len(candidates) > 1:
            if self._admitted is not None and self._admitted.subject is (request.subject or request):
                scores = self._restricted(scores, self._admitted)
            place, is_equal = self._soonest(candidates, weights, request, prompt, scores)
        self._admitted = None
        if place not in scores.places:
            scores.places.append(place)
            scores.waits.append(0.0)
            scores.work.append(scores.plain * prefillers[place].slowness)
        index, hit = scores.places.index(place), 0
        cached: list[float] | None = None
        if prompt.keys:
            hits = [known.own(prefillers[each], prompt)[0] for each in scores.places[: scores.count]]
            hits += [0] * (len(scores.places) - scores.count)
            hit, cached = hits[index], [prompt.ends[each - 1] if each else 0.0 for each in hits]
        self._chosen = request, prefillers[place], prompt, hit, scores.work[index]
        self.snapshot = scores, index, is_equal, cached, has_waited
        return candidates[place]

    def _soonest(
        self,
        candidates: Sequence[Candidate],
        weights: Sequence[int],
        request: PickRequest,
        prompt: PromptCosts,
        scores: _Scores,
    ) -> tuple[int, bool]:
        """Return the place of the chosen prefiller, and whether others are equal."""
        known, near = self._prefillers, scores.near
        prefillers, places, count = known.prefillers, scores.places, scores.count
        equal = [place for place, score in zip(places, scores.scores, strict=True) if score <= near]
        if len(equal) == 1:
            return equal[0], False
        has_idle = scores.has_idle
        if not prompt.keys and (prompt.tokens < MIN_CACHED_PROMPT_TOKENS or request.session is None):
            tied: list[int] = []
            lowest = 0 if has_idle else weights[equal[0]]
            for place in equal:
                if weights[place] < lowest:
                    lowest, tied = weights[place], []
                if weights[place] == lowest:
                    tied.append(place)
            if not has_idle:
                tied.sort()
                return self._next_place(known.reader.slots, tied), True
            scored = set(places[:count])
            return self._next_place_of(
                known.reader.slots,
                lambda place: place in tied if place in scored else scores.takes_idle(prefillers[place].slowness),
            ), True
        if prompt.keys and any(known.own(prefillers[place], prompt)[0] for place in equal):
            return places[scores.index_of_least()], True
        session = request.session
        if session is not None:
            kind = crc32(session.encode(errors="surrogatepass"))
        else:
            kind = prompt.keys[min(len(prompt.keys), _KIND_PIECES) - 1] & 0xFFFFFFFF
        if has_idle:
            scored = set(places[:count])
            equal = [place for place in equal if place in scored]
            for place in known.idle(scored, len(candidates)):
                if not scores.takes_idle(prefillers[place].slowness):
                    break
                equal.append(place)
        equal.sort()
        return max(equal, key=lambda place: crc32(candidates[place].backend.name.encode(), kind)), True

    def cost_of(self, backend: Backend, request: PickRequest) -> Load:
        """Return the predicted prefill time, converted to tokens, and the KV of the prompt."""
        return Load(round(self._choice(backend, request)[4] / SECONDS_PER_LOAD), request.prefill.kv_tokens)

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
        sent = prefiller.send(prompt, hit, seconds, compute, request.prefill.kv_tokens, now)
        if prompt.keys:
            has_waited, self._waited = self._waited is not None and self._waited is request.subject, None
            sent.resident_tokens = self._sets.note_sent(prefiller.cached, prompt, request.session, sent, has_waited)
        # The charge allows for expected cache hits that fail. The reported prediction does not.
        cached = sent.cached
        expected = self._prefillers.cost.seconds(prompt.tokens - cached, cached) * prefiller.slowness
        sent.prediction = Prediction(sent.wait + expected, round(cached))
        return sent

    def reason(self, snapshot: _Snapshot, backend: Backend) -> str:
        scores, index, is_equal, cached, has_waited = snapshot
        if has_waited:
            return WORKING_SET
        if cached is not None:
            soon, hit = scores.waits[index] + _TIE_SECONDS, cached[index]
            if any(wait <= soon and tokens < hit for wait, tokens in zip(scores.waits, cached, strict=True)):
                return CACHED_PREFIX
        return EQUAL if is_equal else LEAST_SECONDS

    def examined(self, snapshot: _Snapshot, candidates: Sequence[Candidate]) -> Sequence[Candidate]:
        """Return the candidates with work or with the prefix, and the fastest idle ones."""
        return [candidates[place] for place in snapshot[0].places]

    def figures(self, snapshot: _Snapshot, weights: Sequence[int]) -> Columns:
        scores, _, _, cached, _ = snapshot
        columns: dict[str, Sequence[float]] = {"wait_seconds": scores.waits, "work_seconds": scores.work}
        if cached is not None:
            columns["cached_tokens"] = cached
        return columns, [*map(add, scores.waits, scores.work)]

    def forget_cache(self, backend: Backend) -> None:
        prefiller = self._prefillers.of(backend)
        prefiller.forget_cache()
        self._sets.forget(prefiller.cached)

    def soonest_seconds(self, candidates: Sequence[Candidate], request: PickRequest) -> float | None:
        """Return the least sum of a prefiller's wait and its prefill time for the prompt."""
        known = self._prefillers
        known.look_up(candidates)
        prompt = prompt_costs(request)
        known.reader.refresh()
        places = known.reader.places_to_score()
        waits = self._waits(places, known.reader.compute, self.context.clock())
        scores = self._scores(prompt, places, waits)
        return min(map(float.__add__, scores.waits, scores.work))

    def relief_seconds(self, candidates: Sequence[Candidate], request: PickRequest) -> float:
        if not self._waiting:
            return 0.0
        self._prefillers.look_up(candidates)
        return len(self._waiting) * self._least_work(prompt_costs(request)) / len(candidates)

    def prefill_seconds(self, uncached: float, cached: float) -> float:
        return self._prefillers.cost.seconds(uncached, cached)

    def working_set(self, backend: Backend) -> Mapping[str, float]:
        home = self._sets.sets.get(self._prefillers.of(backend).cached)
        if home is None:
            return {}
        return {"used": home.used_tokens} | ({"limit": home.limit} if home.limit < inf else {})

    @property
    def remembered_prefixes(self) -> int:
        return sum(len(prefiller.cached) for prefiller in self._prefillers.by_key.values())

    # Queue

    def has_room(self, candidates: Sequence[Candidate]) -> bool:
        """Return whether a candidate would begin with a prompt almost at once."""
        return self._has_room(candidates) is not False

    def admits(self, candidates: Sequence[Candidate], request: Callable[[], PickRequest]) -> bool:
        """Return whether the first request of the queue should go now, and not wait for a better backend.

        If all candidates have room, there is nothing to wait for.
        """
        has_room = self._has_room(candidates)
        if has_room is None:
            return self.first_to_admit(candidates, [request()]) is not None
        return has_room

    def work_seconds(self, candidates: Sequence[Candidate], request: PickRequest) -> float:
        subject = id(request.subject or request)
        prompt = self._waiting[subject] = prompt_costs(request)
        self._sets.note_waiting(prompt.keys, request.session, self.context.clock())
        self._prefillers.look_up(candidates)
        seconds = self._waiting_seconds[subject] = self._least_work(prompt)
        return seconds

    def left_queue(self, request: PickRequest) -> None:
        """Drop the predicted costs of a prompt that has left the queue."""
        self._waited = request.subject
        prompt = self._waiting.pop(id(request.subject or request), None)
        if prompt is not None:
            self._sets.note_left(prompt.keys, request.session, self.context.clock())
        self._waiting_seconds.pop(id(request.subject or request), None)

    def hold_seconds(self, request: PickRequest | None, waiting: int) -> float:
        """Return twice the predicted wait, if engines were learned to compute prompts in order.

        The wait is the time until a prefiller is free, plus the work of all waiting prompts and of later, shorter ones.
        """
        known = self._prefillers
        prefillers = known.prefillers
        if request is None or not prefillers:
            return inf
        known.reader.refresh()
        if known.reader.computing < len(prefillers):
            return inf  # the request waits for decoders
        places, loads = known.reader.places, known.reader.compute
        waits = self._waits(places, loads, self.context.clock())
        if any(map(self._is_free, known.candidates, prefillers, waits, loads)):
            return inf
        work = self._least_work(prompt_costs(request))
        return _HOLD_WAITS * (min(waits) + sum(self._waiting_seconds.values()) / len(prefillers) + work / AGEING)

    def _least_work(self, prompt: PromptCosts) -> float:
        """Return the shortest prefill time of a prompt."""
        return min(self._scores(prompt, [], []).work)

    def first_to_admit(self, candidates: Sequence[Candidate], waiting: Sequence[PickRequest]) -> int | None:
        """Return the index of the first request whose best prefiller has room.

        The requests before it wait for other prefillers. The work of each counts for those that wait behind it.
        """
        known = self._prefillers
        prefillers = known.look_up(candidates)
        known.reader.refresh()
        now, loads, places = self.context.clock(), known.reader.compute, known.reader.places_to_score().copy()
        waits = self._waits(places, loads, now)
        held_back = {
            place
            for place, wait in zip(places, waits, strict=True)
            if not self._is_free(candidates[place], prefillers[place], wait, loads[place])
        }
        for number, request in enumerate(waiting):
            prompt = self._waiting.get(id(request.subject or request)) or prompt_costs(request)
            scores = self._scores(prompt, places, waits)
            home = self._home(prompt, request) if self._sets.is_active else None
            best: set[int] = set()
            for index in range(scores.count):
                place = scores.places[index]
                if (scores.scores[index] <= scores.near if home is None else place == home[0]) and (
                    place not in held_back or self._joins(index, scores, prompt, now)
                ):
                    best.add(place)
            if best or (scores.has_idle if home is None else home[0] not in scores.places[: scores.count]):
                self._admitted = _Admitted(request.subject or request, prefillers, best, scores)
                return number
            soonest = scores.index_of_least()
            if soonest < len(places):
                waits[soonest] += scores.work[soonest]
            else:
                places.append(scores.places[soonest])
                waits.append(scores.work[soonest])
        return None

    def _joins(self, index: int, scores: _Scores, prompt: PromptCosts, now: float) -> bool:
        """Return whether a prompt should join the next step of a prefiller, if it has room in it."""
        prefiller = self._prefillers.prefillers[scores.places[index]]
        if not self._has_room_in_step(prefiller):
            return False
        # If the prompt takes equally long everywhere, waiting for another prefiller gains nothing.
        if prefiller.fits_in_step(prompt.tokens) and self._is_same(scores):
            return True
        return prefiller.is_ending(now) and self._should_join_next_step(prefiller, scores.work[index])

    def _is_same(self, scores: _Scores) -> bool:
        """Return whether a prompt takes equally long on all prefillers."""
        seconds, prefillers = scores.work.copy(), self._prefillers.prefillers
        if len(scores.places) > scores.count:
            for place in self._prefillers.idle(set(scores.places[: scores.count]), len(prefillers)):
                seconds.append(scores.plain * prefillers[place].slowness)
        return max(seconds) <= min(seconds) * (1 + _TIE_SHARE)

    def _home(self, prompt: PromptCosts, request: PickRequest) -> tuple[int, bool] | None:
        """Return the place of the prefiller where the session of a prompt is a resident, or None if there is none.

        The second value is whether the request has waited for that place.
        """
        session = self._sets.find(prompt.keys, request.session, self.context.clock())
        if session is None or not session.is_resident or session.cache is None:
            return None
        place = self._prefillers.place_of.get(session.cache)
        return None if place is None else (place, session.is_placed)

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

    def _should_join_next_step(self, prefiller: Prefiller, seconds: float) -> bool:
        """Return whether a prompt should join the next step rather than the one after it.

        The cost: the prompts of the next step wait for this prompt's own time. The gain: one step less, whose shared
        time is saved for this prompt, for its share of waiting prompts, and for the prompts that arrive meanwhile.
        """
        shared, share = prefiller.shared_seconds, len(self._waiting) / len(self._prefillers.prefillers)
        return prefiller.behind * (seconds - shared) < shared * (1 + share + self._expected_arrivals)

    # Scores

    def _has_room(self, candidates: Sequence[Candidate]) -> bool | None:
        """Return whether all candidates have room. None: some of them have."""
        known = self._prefillers
        prefillers = known.look_up(candidates)
        reader, count = known.reader, len(prefillers)
        reader.refresh()
        idle = (count - reader.computing) / count
        self._busy += _BUSY_STEP * (1 - idle - self._busy)
        if idle == 1:
            return True
        now = self.context.clock()
        if now >= self._lag_due:
            self._lag_due = now + _LAG_LOOK_SECONDS
            lag = self.context.lag_within(now - _LAG_SECONDS, now - _LAG_LOOK_SECONDS)
            self._lag = self._lag if lag is None else lag
        is_any_free, are_all_free, places = idle > 0, True, reader.places_to_score()
        for place in places:
            prefiller, candidate, load = prefillers[place], candidates[place], reader.compute[place]
            # Without a limit and a known order the wait does not count.
            is_unlimited = candidate.limit is None and not prefiller.concurrency.is_orderly
            wait = 0.0 if is_unlimited or not load else prefiller.left(load * SECONDS_PER_LOAD, now)
            if is_unlimited or self._is_free(candidate, prefiller, wait, load):
                is_any_free = True
            else:
                are_all_free = False
            if is_any_free and not are_all_free:
                return None
        if are_all_free:
            return True
        return None if any(self._has_room_in_step(prefillers[place]) for place in places) else False

    @property
    def _expected_arrivals(self) -> float:
        """Expected number of prompts that arrive before a busy prefiller is idle again."""
        return self._busy / (1 - self._busy) if self._busy < _MAX_BUSY else _MAX_CROWDING

    def _scores(self, prompt: PromptCosts, places: Sequence[int], waits: Sequence[float]) -> _Scores:
        """Return the scores of the candidates for a prompt.

        Args:
            prompt: The prompt.
            places: Places of the prefillers that may not be idle.
            waits: Seconds until each of them is free.
        """
        known, counts = self._prefillers, 1 + self.crowding * self._expected_arrivals
        prefillers, is_unknown = known.prefillers, prompt.request.subject is None
        if is_unknown:
            plain = prompt.request.prefill.compute_tokens * SECONDS_PER_LOAD
        else:
            plain = known.cost.seconds(prompt.tokens, 0.0)
        found, handoffs = _Scores([*places], [*waits], plain, counts), self.context.handoffs
        places, waits = found.places, found.waits
        far: Sequence[int] = ()
        if handoffs is not None and handoffs.far:
            far = [known.place_of[key] for key in handoffs.far if key in known.place_of]
        if len(places) < len(prefillers):
            scored = set(places)
            # A passed-through request takes the same time everywhere, whatever the speed.
            for place in range(len(prefillers)) if is_unknown else (*known.holders(prompt), *far):
                if place not in scored:
                    scored.add(place)
                    places.append(place)
                    waits.append(0.0)
            found.count = len(places)
            places += known.idle(scored, _SHOWN_IDLE)
            waits += [0.0] * (len(places) - found.count)
        work = [plain] * len(places) if is_unknown else [plain * prefillers[place].slowness for place in places]
        if prompt.keys:
            for index in range(found.count):
                work[index] = known.own(prefillers[places[index]], prompt)[1]
        found.work = work
        found.scores = scores = [wait + counts * seconds for wait, seconds in zip(waits, work, strict=True)]
        if far and handoffs is not None:
            backends = [known.candidates[place].backend for place in far]
            for place, seconds in zip(far, handoffs.least_extra_seconds(backends, round(prompt.tokens)), strict=True):
                index = places.index(place)
                scores[index] = waits[index] + seconds + counts * work[index]
        least = min(scores)
        found.near = least + max(_TIE_SHARE * least, min(_TIE_SECONDS, 2 * _TIE_SHARE * least))
        return found

    def _restricted(self, scores: _Scores, admitted: _Admitted) -> _Scores:
        """Return the scores of only the prefillers for which the request has left the queue, if there are any."""
        prefillers, before = self._prefillers.prefillers, admitted.scores
        was_scored, best = set(before.places[: before.count]), admitted.best
        if admitted.prefillers is not prefillers:  # the candidates have changed
            places = {prefiller: place for place, prefiller in enumerate(prefillers)}
            now = {place: places.get(prefiller, -1) for place, prefiller in enumerate(admitted.prefillers)}
            was_scored, best = {now[place] for place in was_scored} - {-1}, {now[place] for place in best}
        left = _Scores(scores.places[: scores.count], scores.waits[: scores.count], scores.plain, scores.counts)
        left.work, left.scores, left.admitted = scores.work[: scores.count], scores.scores[: scores.count], before
        for place in was_scored.difference(left.places):  # these are idle now
            left.places.append(place)
            left.waits.append(0.0)
            left.work.append(scores.plain * prefillers[place].slowness)
            left.scores.append(scores.counts * left.work[-1])
        left.count = len(left.places)
        for index, place in enumerate(left.places):
            if not (place in best if place in was_scored else before.takes_idle(prefillers[place].slowness)):
                left.scores[index] = inf
        for index in range(scores.count, len(scores.places)):
            place = scores.places[index]
            if place not in was_scored:
                left.places.append(place)
                left.waits.append(0.0)
                left.work.append(scores.work[index])
                left.scores.append(scores.scores[index] if before.takes_idle(prefillers[place].slowness) else inf)
        if not left.scores or min(left.scores) == inf:
            return scores
        least = min(left.scores)
        left.near = least + max(_TIE_SHARE * least, min(_TIE_SECONDS, 2 * _TIE_SHARE * least))
        return left

    def _waits(self, places: Sequence[int], loads: Sequence[int], now: float) -> list[float]:
        """Return the time until each of some prefillers is free, in seconds. `loads`: compute load by place."""
        prefillers, unit = self._prefillers.prefillers, SECONDS_PER_LOAD
        return [prefillers[place].left(loads[place] * unit, now) if loads[place] else 0.0 for place in places]
