"""Least load in seconds, for decoders: an answer goes where it and the answers that are written there lose least time.

The time of a token beside other answers is learned from answers that ended (decode_pace). A decoder should get no more
answers than it has at its saturation point, so requests wait in the gateway's queue instead. This restriction is
learned and fails open: see DecodePace, and `would_take` and `hold_seconds` below.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from itertools import zip_longest
from operator import add
from typing import TYPE_CHECKING, Final

from proxy.balancer.backend_health import FULL_PERCENT
from proxy.balancer.pick import EQUAL, LEAST_SECONDS, PendingSamples
from proxy.balancer.policies.decode_memory import DecodeMemory, DecoderKv, Fill, HeldKv
from proxy.balancer.policies.decode_pace import PLACES, SIZES, TRUSTED_SECONDS, DecodePace
from proxy.balancer.policies.least_tokens import WEIGHTS, LeastTokens
from proxy.common.backend import Load, Role

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from proxy.balancer.pick import Candidate, Columns, PickRequest, PolicyContext
    from proxy.balancer.shared.scoreboard import SlotReader
    from proxy.common.backend import Backend

    _Snapshot = tuple[Sequence[int], Sequence[int], Sequence[float], bool, Sequence[float] | None]
    """Places of the examined candidates, their running answers and seconds per token, whether several are equal, and
    what slow handoffs add to the seconds per token. None: no handoff is slow."""

logger = logging.getLogger(__name__)

# Interval at which learned values are updated.
_LOOK_SECONDS: Final = 1.0
# Number of ended answers that are learned in one batch, which costs a fraction of learning each at its end.
_BATCH_ANSWERS: Final = 64
# Maximum number of answers that wait to be learned. The oldest ones are dropped first.
_MAX_PENDING: Final = 1024
# Answers are not used if the event loop was late by more than this share of their time, or by this time.
_MAX_LAG_SHARE: Final = 0.02
_MAX_LAG_SECONDS: Final = 0.5
# Weight of an answer's KV relative to the answer itself, so that decoders with less KV win among otherwise equal ones.
_KV_SHARE: Final = 0.1
# Weight of a second until the first token relative to a second of the rest of the answer.
_FIRST_TOKEN_WEIGHT: Final = 5.0
# Assumed time of a decoding step without other answers, until it is learned.
_LIKELY_STEP_SECONDS: Final = 0.02
# Scores that differ by less than this share are equal.
_TIE: Final = 1e-3
_BELOW: Final = 1 - _TIE
_AS_GOOD: Final = 1 + _TIE
# Tiers of candidates. A higher tier gets an answer only if no lower one exists. In ascending order, they have as many
# answers as were tried recently, are at the saturation point, or lack KV memory.
_IS_TRIED: Final = 1
_IS_SATURATED: Final = 2
_LACKS_KV: Final = 3
# Shorter answers are not learned, because their pace predicts little.
_MIN_TOKENS: Final = 8
# Maximum predicted KV of all answers, including those in prefill, as a share of a decoder's KV memory.
_FULL: Final = 0.95
# Maximum KV of the prompts alone, as a share of the memory, for requests that have waited as long as they may.
_OVERFULL: Final = 1.2
# The peak is only predicted for decoders that are charged with this share of their KV memory.
_MIN_FILL: Final = 0.4
# Maximum wait of a request, as a multiple of the time that it is predicted to gain by waiting.
_HOLD_GAINS: Final = 2.0
# Number of idle decoders in the figures of a choice.
_SHOWN_IDLE: Final = 8
_ANY: Final = float("inf")
_AS_CHARGED: Final = Fill(1.0, 1.0)


@dataclass(slots=True, eq=False)
class _Decoder:
    """Activity of one decoder, as this worker knows it."""

    at: float
    """The time up to which `spent` is counted."""
    memory: DecoderKv
    """Its answers, and the tokens that each of them gets."""
    speed: float = 1.0
    """Speed relative to the other decoders."""
    spent: list[float] = field(default_factory=list)
    """Seconds in each bucket of numbers of answers, up to the last bucket with any."""
    writing: int = 0
    """Answers of this worker that it writes."""
    prompts: int = 0
    """Prompts of this worker that it computes."""
    computing: float = 0.0
    """Seconds in which it computed such prompts, while it wrote answers."""


@dataclass(slots=True, eq=False)
class _Ended:
    """An answer that ended and was not learned yet."""

    name: str
    """The decoder's."""
    spent_before: Sequence[float]
    """The decoder's `spent` when the answer began."""
    spent: Sequence[float]
    """The same when it ended."""
    tokens: int
    computing: float
    """Seconds of its time in which the decoder computed prompts."""


class _Answer(HeldKv):
    """An answer of a decoder, from its lease to its end."""

    __slots__ = ("backend", "began_at", "computing_before", "request", "spent_before", "_decoder", "_policy", "_prompt")

    def __init__(self, policy: LeastDecodeSeconds, backend: Backend, request: PickRequest) -> None:
        policy.memory.lease(self, backend.name, request)
        self.backend = backend
        self.request = request
        self.spent_before: Sequence[float] = ()
        self.began_at = 0.0
        self.computing_before = 0.0
        self._policy = policy
        self._decoder: _Decoder | None = None  # once it has begun
        # The decoder until it has computed the prompt. None: a prefiller computes it.
        self._prompt = policy.begin(self, computes_prompt=True) if request.computes_prompt else None

    def note_first_token(self) -> None:
        if self._prompt is not None:
            self._end_prompt(self._prompt)
        decoder = self._decoder = self._policy.begin(self)
        self.began_at = decoder.at
        self.spent_before = decoder.spent.copy()
        self.computing_before = decoder.computing

    def note_end(self, served: bool, answer_tokens: int | None) -> None:
        tokens = answer_tokens if served else None
        if self._prompt is not None:
            self._end_prompt(self._prompt)
        if self._decoder is not None:
            self._policy.end(self, self._decoder, tokens)
        self._policy.memory.leave(self, tokens)

    def _end_prompt(self, decoder: _Decoder) -> None:
        self._policy.end_prompt(self, decoder)
        self._prompt = None


@dataclass(slots=True, eq=False)
class _Bounds:
    """Learned and reported bounds of some candidates. Each list has the order of the candidates."""

    reader: SlotReader
    limits: list[float]
    """The most requests by configuration or by the engines' reports."""
    most: list[float]
    """The most answers that each should have. Requests wait while all have that many."""
    preferred: list[float]
    """The same for choosing, which never makes requests wait. While one decoder is to have fewer answers, to find out,
    the others should have no more than some have had."""
    kv: list[float]
    """The highest charge of each, in KV tokens, at which the predicted KV fits into its memory."""
    prompts_kv: list[float]
    """The same for the KV of prompts alone."""
    slowness: list[float]
    by_speed: list[int] = field(init=False)
    """Places of the candidates, the fastest first."""
    takes_idle: bool = False
    """No bound keeps an answer from an idle candidate."""
    has_kv: bool = False
    is_open: bool = False
    """None of them has any bound for choosing."""
    has_most: bool = False
    """Some have a bound for which requests wait."""

    def __post_init__(self) -> None:
        self.has_kv = min(self.kv, default=_ANY) < _ANY
        self.is_open = not self.has_kv and min(self.preferred, default=_ANY) == _ANY
        self.has_most = self.has_kv or min(self.most, default=_ANY) < _ANY
        self.takes_idle = min(self.most, default=0.0) > 0 and min(self.preferred, default=0.0) > 0
        self.by_speed = sorted(range(len(self.slowness)), key=self.slowness.__getitem__)

    def idle(self, count: int) -> list[int]:
        """Return the places of the fastest idle candidates, at most `count`."""
        found, busy = [], self.reader.busy
        for place in self.by_speed:
            if place not in busy:
                found.append(place)
                if len(found) == count:
                    break
        return found


class LeastDecodeSeconds(LeastTokens):
    """The policy `least_load` for decoders."""

    label = "least_load"
    keeps_weights = False

    def __init__(self, context: PolicyContext | None = None) -> None:
        super().__init__(context)
        self.pace = DecodePace()
        self._decoders: dict[str, _Decoder] = {}  # by name, which has the cheaper hash
        self._pending: PendingSamples[_Ended] = PendingSamples(
            self.context, max_lag_seconds=_MAX_LAG_SECONDS, max_lag_share=_MAX_LAG_SHARE, capacity=_MAX_PENDING
        )
        self.memory = DecodeMemory()
        self._rates: Sequence[float] = [0.0] * len(SIZES)  # tokens per second of one answer, by bucket
        self._fills: dict[str, Fill] = {}  # of decoders whose memory may become short
        self._candidates: Sequence[Candidate] = ()
        self._bounds: _Bounds  # of these
        self._due = 0.0  # when to look again
        self._has_held = False  # the saturation point has made requests wait since it was believed

    def choose(self, candidates: Sequence[Candidate], weights: Sequence[int], request: PickRequest) -> Candidate:
        """Return the candidate where a token takes least, for all answers there together. Equal ones take turns.

        Idle candidates differ only in their speed, so they are not scored one by one.
        """
        bounds = self._bounds if candidates is self._candidates else self._bounds_of(candidates)
        reader = bounds.reader
        running, slowness, is_open = reader.running, bounds.slowness, bounds.is_open
        handoffs = self._handoffs(candidates, request) if request.partner is not None else None
        places, all_weights = reader.places, reader.all_weights
        if weights is not reader.weights:  # they are raised for candidates with less than a full share
            reader.refresh()
            all_weights = sum(weights)
        elif handoffs is None and bounds.takes_idle and not reader.are_few:
            places = reader.places_to_score()
        held = all_weights / (reader.all_running or 1) or 1.0
        pace, share = self.pace, _KV_SHARE / held
        slope, step = 2 * pace.slope, pace.step + pace.slope
        least, best_tier = _ANY, _LACKS_KV
        equal: list[int] = []
        seconds: list[float] = []
        charge = self.memory.charge(request) if bounds.has_kv else 0.0
        for place in places:
            answers, weight, percent = running[place], weights[place], candidates[place].share_percent
            load = answers + share * weight
            score = (step + slope * load) * slowness[place]
            seconds.append(score)
            if percent != FULL_PERCENT:
                load = (load + 1) * FULL_PERCENT / percent - 1
                score = (step + slope * load) * slowness[place]
            if handoffs is not None:
                score += handoffs[place]
            tier = 0 if is_open else self._tier(bounds, place, answers, weight, charge)
            if tier > best_tier:
                continue
            if tier < best_tier:
                best_tier, least = tier, _ANY
            if score < least * _BELOW:
                least, equal = score, [place]
            elif score <= least * _AS_GOOD:
                equal.append(place)
        idle = bounds.idle(_SHOWN_IDLE) if len(places) < len(running) else []
        shown, most = places + idle, 0.0
        answers_there = [running[place] for place in shown]
        if idle:
            seconds += [step * slowness[place] for place in idle]
            best = seconds[len(places)]
            if best_tier > 0 or best < least * _BELOW:
                least, equal = best, []
            if best <= least * _AS_GOOD:
                most = least * _AS_GOOD / step  # an idle candidate is as good as the best one up to this slowness
        if most and (equal or (len(idle) > 1 and slowness[idle[1]] <= most)):
            is_equal, busy = True, reader.busy
            chosen = self._next_place_of(
                reader.slots, lambda place: slowness[place] <= most if place not in busy else place in equal
            )
        elif len(equal) > 1:
            is_equal = True
            chosen = self._next_place(reader.slots, equal)
        else:
            is_equal = False
            chosen = (equal or idle)[0]
        if idle and chosen not in shown:
            shown.append(chosen)
            answers_there.append(0)
            seconds.append(step * slowness[chosen])
        self.snapshot = shown, answers_there, seconds, is_equal, handoffs
        return candidates[chosen]

    def _handoffs(self, candidates: Sequence[Candidate], request: PickRequest) -> list[float] | None:
        """Return what slow handoffs add to the scores of the candidates. None: none of them is slow.

        A second until the first token counts as several seconds of the rest of the answer.
        """
        handoffs, partner = self.context.handoffs, request.partner
        if handoffs is None or partner is None:
            return None
        extra = handoffs.extra_seconds(partner, candidates, request.prompt_tokens or request.decode.kv_tokens)
        if extra is None:
            return None
        pace = self.pace
        unit = _FIRST_TOKEN_WEIGHT / max(1.0, self.memory.likely_tokens(request))
        if not pace.is_fitted:
            unit *= pace.step / _LIKELY_STEP_SECONDS
        return [unit * each for each in extra]

    def _tier(self, bounds: _Bounds, place: int, answers: int, held: int, charge: float) -> int:
        """Return how little a candidate should get an answer with this charge. Within a tier the load decides."""
        if answers > 0 and held + charge > bounds.kv[place]:
            return _LACKS_KV
        if answers >= bounds.most[place]:
            return _IS_SATURATED
        return _IS_TRIED if answers >= bounds.preferred[place] else 0

    def reason(self, snapshot: _Snapshot, backend: Backend) -> str:
        return EQUAL if snapshot[3] else LEAST_SECONDS

    def examined(self, snapshot: _Snapshot, candidates: Sequence[Candidate]) -> Sequence[Candidate]:
        """Return the candidates with answers, and the fastest idle ones."""
        return [candidates[place] for place in snapshot[0]]

    def figures(self, snapshot: _Snapshot, weights: Sequence[int]) -> Columns:
        _, running, seconds, _, handoffs = snapshot
        if handoffs is None:
            return {"running": running, "token_seconds": seconds}, seconds
        scores = list(map(add, seconds, handoffs))
        return {"running": running, "token_seconds": seconds, "handoff_token_seconds": handoffs}, scores

    # For the queue

    def has_room(self, candidates: Sequence[Candidate]) -> bool:
        """Return whether a candidate is below its saturation point and has KV memory for one more answer."""
        if candidates is not self._candidates:
            if self.context.clock() >= self._due:
                self._look(candidates)
            else:
                self._candidates, self._bounds = candidates, self._bounds_of(candidates)
        bounds = self._bounds
        if not bounds.has_most or self._has_free(bounds):
            return True
        if not self._has_held and self.pace.most < _ANY and self.would_take(candidates):
            self._has_held = True
            logger.info(
                "decode policy: saturation point learned: requests wait before the limits of the engines are reached",
                extra={"fields": {"most_running": int(self.pace.most)}},
            )
        return False

    def admits(self, candidates: Sequence[Candidate], request: Callable[[], PickRequest]) -> bool:
        """Return whether the first request of the queue should go now, and not wait for a better backend.

        A request with a long prompt waits until it fits into the KV memory of a candidate.
        """
        if not self.has_room(candidates):
            return False
        bounds = self._bounds
        if not bounds.has_kv:
            return True
        charge = self.memory.charge(request())
        held = bounds.reader.held
        return any(
            answers < bounds.most[place] and (not answers or held[place] + charge <= bounds.kv[place])
            for place, answers in enumerate(bounds.reader.running)
        )

    def would_take(self, candidates: Sequence[Candidate]) -> bool:
        """Return whether a candidate is below its limit, ignoring learned limits.

        The KV of prompts counts. The learned saturation point and lengths of answers do not.
        """
        bounds = self._bounds if candidates is self._candidates else self._bounds_of(candidates)
        bounds.reader.refresh()
        held = bounds.reader.held
        return any(
            answers < bounds.limits[place] and (not answers or held[place] <= bounds.prompts_kv[place])
            for place, answers in enumerate(bounds.reader.running)
        )

    def hold_seconds(self, request: PickRequest | None, waiting: int) -> float:
        """See Policy: twice what the answer is predicted to gain.

        Without the limit the answer would share its decoder with all that wait, too. So it gains the time that each
        token of these saves. That is more with each of them, where the throughput falls further.
        """
        if not self.pace.gain_seconds or not self._candidates or self._has_free(self._bounds):
            return _ANY
        bounds = self._bounds
        sharing = (bounds.reader.all_running + waiting) / len(bounds.most)
        return _HOLD_GAINS * self.pace.gain_at(sharing) * sharing * self.memory.likely_tokens(request)

    def most_running(self, backend: Backend) -> int | None:
        """Return the number of running answers at a decoder's saturation point."""
        return None if self.pace.most == _ANY else int(self.pace.most)

    @property
    def append_harm(self) -> float | None:
        """See Policy."""
        return self.pace.harm.share

    def answers_within(self, token_seconds: float) -> float | None:
        pace = self.pace
        return max(1.0, (token_seconds - pace.step) / pace.slope) if pace.is_fitted else None

    def work_seconds(self, candidates: Sequence[Candidate], request: PickRequest) -> float:
        """Return what the answer takes of a decoder at its highest throughput; 0.0: not known."""
        return self.pace.token_seconds * self.memory.likely_tokens(request)

    def _has_free(self, bounds: _Bounds) -> bool:
        reader = bounds.reader
        reader.refresh()
        if bounds.takes_idle and len(reader.busy) < len(reader.places):
            return True
        held = reader.held
        for place, answers in enumerate(reader.running):
            if answers < bounds.most[place] and not self._lacks_kv(bounds, place, answers, held[place]):
                return True
        return False

    def _lacks_kv(self, bounds: _Bounds, place: int, answers: int, held: int) -> bool:
        """Return whether a candidate has no KV memory for one answer more, beside some that are charged with `held`.

        The next answer counts as the last ones did, but as no more than those here: after a few that were large, small
        ones must not go one by one.
        """
        return answers > 0 and held + min(self.memory.mean_charge, held / answers) > bounds.kv[place]

    # Charges

    def cost_of(self, backend: Backend, request: PickRequest) -> Load:
        """Return the prompt's KV and what the answer will probably add to it."""
        return Load(request.decode.compute_tokens, self.memory.charge(request))

    # Learning

    def track(self, backend: Backend, request: PickRequest) -> _Answer:
        return _Answer(self, backend, request)

    def begin(self, answer: _Answer, *, computes_prompt: bool = False) -> _Decoder:
        """Record that a decoder writes one more answer, or until `end_prompt` that it computes its prompt."""
        now, backend = self.context.clock(), answer.backend
        decoder = self._decoders.get(backend.name)
        if decoder is None:
            decoder = self._decoders[backend.name] = _Decoder(now, answer.holder)
        self._count_elapsed_time(backend, decoder, now)
        if computes_prompt:
            decoder.prompts += 1
        else:
            decoder.writing += 1
            answer.began = decoder.memory.tokens
        return decoder

    def end_prompt(self, answer: _Answer, decoder: _Decoder) -> None:
        """Record that a decoder has computed the prompt of an answer, or has given it up."""
        self._count_elapsed_time(answer.backend, decoder, self.context.clock())
        decoder.prompts -= 1

    def end(self, answer: _Answer, decoder: _Decoder, tokens: int | None) -> None:
        """Note that a decoder writes one answer less. It teaches if it is complete and its tokens are known."""
        now, backend = self.context.clock(), answer.backend
        self._count_elapsed_time(backend, decoder, now)
        decoder.writing -= 1
        if tokens is not None and tokens >= _MIN_TOKENS:
            computing = decoder.computing - answer.computing_before
            ended = _Ended(backend.name, answer.spent_before, decoder.spent.copy(), tokens, computing)
            self._pending.add(ended, answer.began_at, now)
            if len(self._pending) % _BATCH_ANSWERS == 0:
                self._learn()
        if now >= self._due:
            self._look(self._candidates)

    def _count_elapsed_time(self, backend: Backend, decoder: _Decoder, now: float) -> None:
        """Count the time until now: the decoder has written the same number of answers."""
        if answers := decoder.writing:
            if self.context.others_running is not None:
                answers += self.context.others_running(backend)
            place, spent = PLACES[answers] if answers < len(PLACES) else len(SIZES) - 1, decoder.spent
            if place >= len(spent):
                spent += [0.0] * (place + 1 - len(spent))
            spent[place] += now - decoder.at
            if decoder.prompts:
                decoder.computing += now - decoder.at
            decoder.memory.tokens += (now - decoder.at) * self._rates[place] * decoder.speed
        decoder.at = now

    def _look(self, candidates: Sequence[Candidate]) -> None:
        """Use what was learned for choosing among these from now on."""
        now = self.context.clock()
        self._due = now + _LOOK_SECONDS
        self._learn()
        before = self.pace.most
        self.pace.look(now)
        if self.pace.most == _ANY and before < _ANY:
            self._log_dropped(before)
        self._rates = self.pace.rates
        for name, known in self._decoders.items():
            known.speed = 1 / self.pace.slowness(name)
        present = {candidate.backend.name for candidate in candidates}
        for name in [
            name for name, known in self._decoders.items() if name not in present and not known.writing | known.prompts
        ]:
            del self._decoders[name]
            self.pace.forget(name)
        for name in [name for name in self.memory.decoders if name not in present]:
            self.memory.forget(name)
        if candidates:
            bounds = self._bounds_of(candidates)
            if bounds.has_kv:
                names = [candidate.backend.name for candidate in candidates]
                filled = zip(names, bounds.kv, bounds.reader.held, strict=True)
                self._fills = self.memory.look([name for name, most, held in filled if held > _MIN_FILL * most])
                bounds = self._bounds_of(candidates)
            self._candidates, self._bounds = candidates, bounds

    def _log_dropped(self, most: float) -> None:
        held, self._has_held = self._has_held, False
        if held:
            why = "throughput was not higher at this point" if self.pace.is_doubted else "it is no longer certain"
            logger.log(
                logging.WARNING if self.pace.is_doubted else logging.INFO,
                "decode policy: learned saturation point dropped: %s",
                why,
                extra={"fields": {"most_running": int(most)}},
            )

    def _learn(self) -> None:
        """Learn from the answers that ended, in their order, as far as it is known whether the event loop was late."""
        for ended, at, is_timely in self._pending.settled():
            if is_timely:
                both = zip_longest(ended.spent_before, ended.spent, fillvalue=0.0)
                spent = [(place, after - before) for place, (before, after) in enumerate(both) if after > before]
                self.pace.learn(ended.name, spent, ended.tokens - 1, at, computing=ended.computing)

    def _bounds_of(self, candidates: Sequence[Candidate]) -> _Bounds:
        pace = self.pace
        most = [pace.most] * len(candidates)
        # Each decoder is the one that finds out in turn.
        scout = int(self._due / TRUSTED_SECONDS) % len(most)
        most[scout] = pace.scout_most
        preferred = most.copy()
        if pace.scout_prefers < _ANY and len(most) > 1:
            preferred = [min(each, pace.most_seen) for each in most]
            preferred[scout] = pace.scout_prefers
        backends = [candidate.backend for candidate in candidates]
        facts = [self.context.facts(backend) for backend in backends]
        limits = [_ANY if candidate.limit is None else float(candidate.limit) for candidate in candidates]
        slots = [backend.slot for backend in backends]
        reader = candidates[0].scoreboard.reader(slots, *WEIGHTS[Role.DECODE])
        prompts = kv = [_ANY if each is None or each.kv_tokens is None else float(each.kv_tokens) for each in facts]
        if min(kv) < _ANY:
            fills = [self._fills.get(backend.name, _AS_CHARGED) for backend in backends]
            prompts = [_OVERFULL * most / fill.prompts for most, fill in zip(kv, fills, strict=True)]
            kv = [_FULL * most / fill.needed for most, fill in zip(kv, fills, strict=True)]
        return _Bounds(
            reader=reader,
            limits=limits,
            most=list(map(min, most, limits)),
            preferred=list(map(min, preferred, limits)),
            kv=kv,
            prompts_kv=prompts,
            slowness=[pace.slowness(backend.name) for backend in backends],
        )
