"""Working sets: how many conversations may use the prefix caches of prefillers at the same time.

A conversation sends its history again with each turn. If more conversations take turns than the caches hold, each turn
evicts the prefix that another one is about to need, and all turns are computed from the start. Then it is better that
some conversations wait while the others keep their prefixes (Denning's working sets).

A session is a chain of prompts, of which each extends an earlier one, or which have the same session ID. It is a
resident of one prefiller while its prefix should stay in the cache there. `WorkingSets` limits the tokens of residents
only after residents have lost their prefixes to eviction while the prefillers were busy. The limit shrinks quickly
while residents lose prefixes, and grows slowly while they do not. It is lifted if it does not raise the hit rate.

Each worker has working sets for all prefillers. Records of the journal keep them equal, so that all workers and
gateways together admit as many tokens as one worker would. If records are lost, a worker knows fewer residents.
"""

from __future__ import annotations

import random
from math import exp, inf
from typing import TYPE_CHECKING, Final
from zlib import crc32

from xxhash import xxh3_64_intdigest

from proxy.balancer.policies.prefill_cost import RecordKind
from proxy.balancer.policies.session_records import NO_LIMIT, LimitChange, SessionChange, WaitingTurns

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from proxy.balancer.policies.prefill_cost import JournalRecord, PromptCosts, SentPrompt
    from proxy.balancer.policies.prefixes import CachedPrefixes
    from proxy.balancer.policies.session_records import SessionRecords

# Maximum number of sessions, and of remembered ends of prompts per session. A client may repeat or fork a turn.
MAX_SESSIONS: Final = 8192
_MAX_TAILS: Final = 6
# Prompts whose tokens are fewer take no notable part of a cache.
_MIN_TOKENS: Final = 1024
# So many tokens may be missing without an eviction, because engines find whole blocks.
_TOLERATED_TOKENS: Final = 2048
# Weight of a new observation in the share of lost prefixes.
_LOSS_STEP: Final = 1 / 48
# Time constant of the tokens per second, in seconds.
_RATE_SECONDS: Final = 60.0
# The limit begins at this share of lost prefixes, and while prefillers are busy for this share of time.
_THRASHING: Final = 0.15
_BUSY: Final = 0.85
# The first limit, as a share of the residents' tokens at that time.
_FIRST_SHARE: Final = 0.75
# A limit shrinks by its share of lost prefixes times this factor, at least by the share below, and only if more than
# that share of prefixes is lost. It grows by a factor if less than another share is lost and it is nearly full.
_SHRINK: Final = 0.6
_LEAST_SHRINK: Final = 0.12
_LOSSES_TO_SHRINK: Final = 0.06
_GROW: Final = 1.01
_GROW_CAREFULLY: Final = 1.002
# A limit grows carefully from this share of the one at which prefixes were lost.
_CAREFUL_SHARE: Final = 0.92
_LOSSES_TO_GROW: Final = 0.02
_FULL: Final = 0.93
# Times between two changes of a limit, in seconds.
_SHRINK_SECONDS: Final = 15.0
_GROW_SECONDS: Final = 5.0
# A limit is at least this number of tokens.
_LEAST_LIMIT: Final = 16_384.0
# The limit ends when no session has waited for this time.
_UNUSED_SECONDS: Final = 60.0
# The limit is judged after this time. Prefillers that are not busy must compute this share of the tokens per second of
# the time before.
_TRIAL_SECONDS: Final = 90.0
# The limit is lifted when it has not paid for this time.
_FAILING_SECONDS: Final = 60.0
_IDLE_UTILISATION: Final = 0.4
_LEAST_RATE: Final = 0.7
# A limit that was lifted does not begin again for this time, which doubles up to the longest.
_LIFTED_SECONDS: Final = 300.0
_LONGEST_LIFTED_SECONDS: Final = 3600.0
# Time constant of the utilisation of prefillers, in seconds.
_UTILISATION_SECONDS: Final = 20.0
# A resident gives way only while prefillers are busy for less than this share of time: cold prompts need the rest.
_MOST_BUSY_TO_SWITCH: Final = 0.7
# Number of turns that a resident has before it gives way to a session of the same client key.
_QUANTUM_TURNS: Final = 8
# A resident counts as idle after this multiple of the time within which most pauses end, which begins with a value and
# has bounds.
_IDLE_PAUSES: Final = 1.5
_FIRST_PAUSE: Final = 10.0
_MIN_PAUSE: Final = 4.0
_MAX_PAUSE: Final = 20.0
# Pauses beyond this time belong to another visit.
_LONGEST_PAUSE: Final = 300.0
_PAUSE_QUANTILE: Final = 0.95
_PAUSE_STEP: Final = 0.05
# A turn that has arrived is sent, or its client leaves, within this time.
_LONGEST_WAIT: Final = 300.0
# One session counts for at most this share of a limit, so that a large one has its turn, too.
_MOST_OF_A_LIMIT: Final = 0.5
# Number of waiting sessions of one key that are tried before the next key.
_LOOKAHEAD: Final = 8
# Interval at which a worker reports its waiting turns to the others, and the time for which a report counts.
_REPORT_SECONDS: Final = 0.5
_REPORT_COUNTS_SECONDS: Final = 2.0
# Number of workers whose reports are kept.
_MAX_REPORTS: Final = 256


class CachedSession:
    """One conversation."""

    def __init__(self, id_key: int) -> None:
        self.last_prefix_key = 0
        """Number of its client key. 0: unknown."""
        self.context_tokens = 0.0
        """Tokens of its last prompt."""
        self.shared_tokens = 0.0
        """Tokens at its beginning that another session had sent before. They count for that session."""
        self.prefiller_cache: CachedPrefixes | None = None
        """Prefiller of its last prompt, or where it was placed. None: there is none."""
        self.is_resident = False
        self.is_placed = False
        """Whether its next prompt should go to `prefiller_cache`, where room was made for it."""
        self.idle_since = 0.0
        """Time at which its last prompt was computed. In the future while a prompt of it waits or is computed."""
        self.turn_count = 0
        """Turns since it became a resident."""
        self.sent_at = -inf
        """Time at which its last prompt was sent."""
        self.session_id_key = id_key
        """Key of its session ID. 0: it has none."""
        self.tail_keys: list[int] = []
        """Keys of the ends of its last prompts, oldest first."""

    @property
    def own_tokens(self) -> float:
        """Tokens that only this session needs."""
        return max(1.0, self.context_tokens - self.shared_tokens)


class WorkingSet:
    """Residents of one prefiller."""

    def __init__(self, cache: CachedPrefixes) -> None:
        self.prefiller_cache = cache
        self.resident_tokens: dict[CachedSession, float] = {}
        """Residents and the tokens that they are charged with, the least recently used first."""
        self.used_tokens = 0.0
        self.limit_tokens = inf
        """Maximum of `used_tokens`."""
        self.ceiling_tokens = inf
        """The limit grows slowly beyond this number of tokens."""
        self.placed_session: CachedSession | None = None
        """The session that was placed last. None: none was."""
        self.loss_share = 0.0
        """Mean recent share of residents that have lost their prefix."""
        self.changed_at = 0.0
        """Time at which the limit was lowered."""
        self.grown_at = 0.0
        """Time at which the limit was changed."""

    @property
    def free_tokens(self) -> float:
        """Tokens for further residents."""
        return self.limit_tokens - self.used_tokens

    def charge_session(self, session: CachedSession) -> None:
        """Make a session a resident, or update its tokens. It becomes the most recently used one."""
        tokens = session.own_tokens
        self.used_tokens += tokens - self.resident_tokens.pop(session, 0.0)
        self.resident_tokens[session] = tokens
        session.is_resident = True

    def discharge_session(self, session: CachedSession) -> None:
        """Remove a resident."""
        self.used_tokens -= self.resident_tokens.pop(session, 0.0)
        session.is_resident = False
        session.is_placed = False
        session.turn_count = 0

    def awaits_prompt(self, now: float) -> bool:
        """Return whether the prompt of a placed session is still to come. Then no other session is placed."""
        placed = self.placed_session
        return placed is not None and placed.is_placed and placed.idle_since > now


class WorkingSets:
    """Sessions and working sets of all prefillers, as one worker knows them."""

    def __init__(
        self,
        is_enabled: Callable[[], bool] = lambda: True,
        caches: Callable[[], Iterable[CachedPrefixes]] | None = None,
        records: SessionRecords | None = None,
    ) -> None:
        """Create working sets without limits.

        Args:
            is_enabled: Returns whether limits may begin.
            caches: Returns the caches of the prefillers that get prompts now. None: all prefillers get prompts.
            records: Records of changes, for the other workers. None: there are none.
        """
        self._are_limits_enabled = is_enabled
        self._list_caches = caches
        self._session_records = records
        self._worker_id = random.random()  # stands for this worker in reports of waiting turns
        self._reported_at = -inf  # when the waiting turns were reported last
        self._reports_by_worker: dict[float, tuple[float, float]] = {}  # times and waiting turns of other workers
        self.are_limits_active = False
        """Whether sessions may have to wait now."""
        self.sets_by_cache: dict[CachedPrefixes, WorkingSet] = {}
        self.waiting_turn_count = 0
        """Number of turns that wait now. The queue updates it."""
        self.lifted_count = 0
        """Number of times that the limit was lifted, because it did not pay."""
        self._expected_tokens = self._lost_tokens = 0.0  # since the last call of `take_token_counts`
        self.shed_turn_count = 0
        """Number of times that a limit was lowered, so that residents may have lost their place."""
        self._pause = _FIRST_PAUSE  # time within which most pauses end
        self._by_tail: dict[int, CachedSession] = {}
        self._by_id: dict[int, CachedSession] = {}
        self._sessions: dict[CachedSession, None] = {}  # the least recently used first
        self._tokens = 0.0  # decayed tokens of computed prompts
        self._tokens_at = 0.0
        self._busy = 0.0  # decayed seconds of prefill work
        self._busy_at = 0.0
        self._began = 0.0  # when the limit began
        self._rate_limited = 0.0  # tokens per second when the limit was lifted
        self._rate_before = 0.0  # tokens per second when the limit began
        self._failing_since = inf  # since when the limit does not pay
        self._losses = 0.0  # mean share of lost prefixes of all residents since the limit began
        self._waited_at = 0.0  # when a turn waited last
        self._believed_from = -inf  # a lifted limit does not begin before
        self._lifted_seconds = _LIFTED_SECONDS

    def __len__(self) -> int:
        """Return the number of remembered sessions."""
        return len(self._sessions)

    @property
    def idle_seconds(self) -> float:
        """Time after which a resident counts as idle."""
        return _IDLE_PAUSES * self._pause

    @property
    def resident_count(self) -> int:
        """Number of residents of all prefillers."""
        return sum(len(home.resident_tokens) for home in self.sets_by_cache.values())

    def take_token_counts(self) -> tuple[float, float]:
        """Return the tokens that residents should have found and the part that was evicted, since the last call."""
        counts = self._expected_tokens, self._lost_tokens
        self._expected_tokens = self._lost_tokens = 0.0
        return counts

    # Sessions

    def find_session(self, prefix_keys: Sequence[int], session_id: str | None, now: float) -> CachedSession | None:
        """Return the session that a prompt continues, or None if it is the first of a session."""
        tails = self._by_tail
        for key in reversed(prefix_keys):
            session = tails.get(key)
            if session is not None:
                return session
        if session_id is not None:
            session = self._by_id.get(_key_of_session_id(session_id))
            # A chain that runs at the same time is another conversation, for example of a sub-agent.
            if session is not None and session.idle_since <= now:
                return session
        return None

    def record_arrival(self, prefix_keys: Sequence[int], session_id: str | None, now: float) -> None:
        """Note that a prompt has arrived and waits in the queue, so that its session is not idle."""
        session = self.find_session(prefix_keys, session_id, now)
        if session is not None:
            self._record_turn(session, now)

    def record_left_queue(self, prefix_keys: Sequence[int], session_id: str | None, now: float) -> None:
        """Note that a prompt has left the queue, to be sent or not."""
        session = self.find_session(prefix_keys, session_id, now)
        if session is not None and session.idle_since > now:
            session.idle_since = now
            if session.is_resident:
                self._announce_session(session, now)

    def record_local_turn(self, prefix_keys: Sequence[int], session_id: str | None, now: float) -> None:
        """Note that a decoder computes a turn. It counts for the session, whose prefix in the prefiller stays."""
        session = self.find_session(prefix_keys, session_id, now)
        if session is not None:
            session.turn_count += 1
            session.idle_since = now
            self._remember_prompt_end(session, prefix_keys)
            self._announce_session(session, now)

    def record_client_gone(self, session: CachedSession, now: float) -> None:
        """Note that the client of a waiting turn has left."""
        session.idle_since = now
        self._announce_session(session, now)

    def record_sent_prompt(
        self,
        cache: CachedPrefixes,
        prompt: PromptCosts,
        session_id: str | None,
        sent_prompt: SentPrompt,
        has_waited: bool,
    ) -> float:
        """Note that a prompt goes to a prefiller.

        Args:
            cache: The cache of the prefiller.
            prompt: The prompt.
            session_id: ID that the client sends with related requests. None: it sends none.
            sent_prompt: The prompt in flight.
            has_waited: Whether it waited in the queue, so that its client sent it some time ago.

        Returns:
            Tokens that a resident should find in the cache. 0: the session is not a resident there.
        """
        cached, now = sent_prompt.predicted_cached_tokens, sent_prompt.sent_at
        self.record_prefill_work(sent_prompt.predicted_seconds, now)
        if prompt.prompt_tokens < _MIN_TOKENS:
            return 0.0
        session = self.find_session(prompt.prefix_keys, session_id, now)
        expected = 0.0
        if session is None:
            session = self._make_session(0 if session_id is None else _key_of_session_id(session_id))
            session.shared_tokens = cached
        else:
            if not has_waited and not session.is_placed:
                self._learn_pause(now - session.idle_since)
            if session.context_tokens > prompt.prompt_tokens:  # its history was replaced
                session.shared_tokens = min(session.shared_tokens, cached)
            elif session.is_resident and session.prefiller_cache is not None:
                if session.prefiller_cache is not cache:  # it may go anywhere if its prefix is gone
                    expected = (
                        session.context_tokens if _has_lost_prefix(session.prefiller_cache, session, prompt) else 0.0
                    )
                elif session.sent_at > self._working_set_of(cache).changed_at:
                    expected = session.context_tokens
        before = session.prefiller_cache
        if session.is_resident and before is not None and before is not cache:
            self._working_set_of(before).discharge_session(session)
        session.is_placed = False
        session.context_tokens = float(prompt.prompt_tokens)
        session.prefiller_cache = cache
        session.turn_count += 1
        session.sent_at = now
        session.idle_since = now + _LONGEST_WAIT
        home = self._working_set_of(cache)
        if not self.are_limits_active:
            self._remove_idle_residents(home, now)
        if session.is_resident or not self.are_limits_active or session.own_tokens <= home.free_tokens:
            home.charge_session(session)
        self._remember_prompt_end(session, prompt.prefix_keys)
        self._announce_session(session, now)
        return expected

    def record_prompt_end(self, cache: CachedPrefixes, sent_prompt: SentPrompt, now: float) -> None:
        """Note that a prompt has been computed, or has failed."""
        session = self.find_session(sent_prompt.prompt_costs.prefix_keys, None, now)
        if session is not None:
            session.idle_since = now
        computed: tuple[float, float, float] | None = None
        if sent_prompt.reported_usage is not None:
            (tokens, cached), expected = sent_prompt.reported_usage, sent_prompt.resident_tokens
            self._record_computed_tokens(tokens, now)
            lost = 0.0
            home = self.sets_by_cache.get(cache)  # None: the cache was emptied meanwhile
            if expected >= _MIN_TOKENS and home is not None:
                lost = max(0.0, 1 - (cached + _TOLERATED_TOKENS) / expected)
                self._record_loss(home, lost)
                self._expected_tokens += expected
                self._lost_tokens += lost * expected
                self._adjust_limits(home, now)
            computed = float(tokens), expected, lost
        if session is not None:
            self._announce_session(session, now, computed)

    def record_prefill_work(self, seconds: float, now: float) -> None:
        """Note that a prompt with this prefill time was sent to a prefiller, by this worker or another one."""
        self._busy = self._decayed_work_seconds(now) + seconds
        self._busy_at = now

    def _record_computed_tokens(self, tokens: float, now: float) -> None:
        self._tokens = self._tokens * exp((self._tokens_at - now) / _RATE_SECONDS) + tokens
        self._tokens_at = now

    def _record_loss(self, working_set: WorkingSet, lost_share: float) -> None:
        """Note the share of its prefix that a resident has lost."""
        working_set.loss_share += _LOSS_STEP * (lost_share - working_set.loss_share)
        self._losses += _LOSS_STEP * (lost_share - self._losses)

    def forget_cache(self, cache: CachedPrefixes) -> None:
        """Forget the residents of a prefiller whose cache is empty."""
        lost = self.sets_by_cache.pop(cache, None)
        if lost is not None:
            for session in list(lost.resident_tokens):
                lost.discharge_session(session)

    def _make_session(self, id_key: int) -> CachedSession:
        session = CachedSession(id_key)
        if len(self._sessions) >= MAX_SESSIONS:
            self._drop_session(next(iter(self._sessions)))
        self._sessions[session] = None
        if id_key:
            self._by_id[id_key] = session
        return session

    def _drop_session(self, session: CachedSession) -> None:
        del self._sessions[session]
        if session.is_resident and session.prefiller_cache is not None:
            self._working_set_of(session.prefiller_cache).discharge_session(session)
        for key in session.tail_keys:
            if self._by_tail.get(key) is session:
                del self._by_tail[key]
        if self._by_id.get(session.session_id_key) is session:
            del self._by_id[session.session_id_key]

    def _remember_prompt_end(self, session: CachedSession, keys: Sequence[int]) -> None:
        """Remember the end of a prompt. Its last piece may be partial, so the piece before it counts, too."""
        self._remember_tails(session, keys[-2:])

    def _remember_tails(self, session: CachedSession, keys: Sequence[int]) -> None:
        self._sessions[session] = self._sessions.pop(session)
        tails = self._by_tail
        for key in keys:
            if tails.get(key) is not session:
                tails[key] = session
                session.tail_keys.append(key)
        while len(session.tail_keys) > _MAX_TAILS:
            key = session.tail_keys.pop(0)
            if tails.get(key) is session:
                del tails[key]

    def _record_turn(self, session: CachedSession, now: float) -> None:
        """Note that a turn of a session has arrived and is not sent yet."""
        self._learn_pause(now - session.idle_since)
        session.idle_since = now + _LONGEST_WAIT
        if session.is_resident:
            self._announce_session(session, now)

    def _learn_pause(self, seconds: float) -> None:
        """Follow the upper tail of pauses by stochastic approximation of a quantile."""
        if 0 < seconds < _LONGEST_PAUSE:
            step = _PAUSE_STEP * self._pause
            self._pause += step * (_PAUSE_QUANTILE if seconds > self._pause else _PAUSE_QUANTILE - 1)
            self._pause = min(_MAX_PAUSE, max(_MIN_PAUSE, self._pause))

    def _working_set_of(self, cache: CachedPrefixes) -> WorkingSet:
        known = self.sets_by_cache.get(cache)
        if known is None:
            known = self.sets_by_cache[cache] = WorkingSet(cache)
            if self.are_limits_active:
                known.limit_tokens = max(
                    (each.limit_tokens for each in self.sets_by_cache.values() if each is not known), default=inf
                )
        return known

    @property
    def _open_sets(self) -> Collection[WorkingSet]:
        """Working sets of the prefillers that get prompts now."""
        if self._list_caches is None:
            return self.sets_by_cache.values()
        return [self.sets_by_cache[cache] for cache in self._list_caches() if cache in self.sets_by_cache]

    # Limits

    def utilisation(self, now: float) -> float:
        """Return the recent prefill work relative to the time of all prefillers."""
        return self._decayed_work_seconds(now) / (_UTILISATION_SECONDS * max(1, len(self._open_sets)))

    def _decayed_work_seconds(self, now: float) -> float:
        return self._busy * exp((self._busy_at - now) / _UTILISATION_SECONDS)

    def _awaits_turn(self, now: float) -> bool:
        """Return whether a turn of a session waits at this worker or another one."""
        if self.waiting_turn_count:
            return True
        return any(turns > 0 and now - at < _REPORT_COUNTS_SECONDS for at, turns in self._reports_by_worker.values())

    def _computed_tokens_per_second(self, now: float) -> float:
        """Return the recent tokens per second of computed prompts."""
        return self._tokens * exp((self._tokens_at - now) / _RATE_SECONDS) / _RATE_SECONDS

    def _adjust_limits(self, working_set: WorkingSet, now: float) -> None:
        """Begin, change or end the limits, after an observation of a resident."""
        if not self.are_limits_active:
            # If less is computed without the limit, it has paid.
            may_begin = (
                now >= self._believed_from or self._computed_tokens_per_second(now) < _LEAST_RATE * self._rate_limited
            )
            if may_begin and max(working_set.loss_share, self._losses) > _THRASHING and self.utilisation(now) > _BUSY:
                self._begin_limits(now)
            return
        since, is_awaited = now - working_set.changed_at, self._awaits_turn(now)
        if working_set.loss_share > _LOSSES_TO_SHRINK:
            if since > _SHRINK_SECONDS:
                working_set.ceiling_tokens = _CAREFUL_SHARE * working_set.limit_tokens
                self._change_limit(
                    working_set,
                    working_set.limit_tokens * (1 - max(_LEAST_SHRINK, _SHRINK * working_set.loss_share)),
                    now,
                )
                working_set.loss_share = 0.0
        elif (
            working_set.loss_share < _LOSSES_TO_GROW
            and is_awaited
            and now - working_set.grown_at > _GROW_SECONDS
            and working_set.free_tokens < (1 - _FULL) * working_set.limit_tokens
        ):
            working_set.limit_tokens *= (
                _GROW if working_set.limit_tokens < working_set.ceiling_tokens else _GROW_CAREFULLY
            )
            working_set.grown_at = now
            self._announce_limit(working_set, now)
        if is_awaited:
            self._waited_at = now
        elif now - self._waited_at > _UNUSED_SECONDS:
            self._end_limits(now)
            return
        if now - self._began > _TRIAL_SECONDS and is_awaited:
            self._judge_limits(now)

    def _judge_limits(self, now: float) -> None:
        """Lift the limit for some time if it has not paid for a while.

        It pays if residents find their prefixes, and if prefillers are busy or compute as much as before.
        """
        is_idle = (
            self.utilisation(now) < _IDLE_UTILISATION
            and self._computed_tokens_per_second(now) < _LEAST_RATE * self._rate_before
        )
        if self._losses < _THRASHING and not is_idle:
            self._lifted_seconds, self._failing_since = _LIFTED_SECONDS, inf
            return
        self._failing_since = min(self._failing_since, now)
        if now - self._failing_since < _FAILING_SECONDS:
            return
        self.lifted_count += 1
        lifted = self._lifted_seconds
        self._lift_limits(lifted, now)
        self._end_limits(now, lifted)

    def _lift_limits(self, seconds: float, now: float) -> None:
        """Let no limit begin for this time."""
        self._believed_from = now + seconds
        self._rate_limited = self._computed_tokens_per_second(now)
        self._lifted_seconds = min(_LONGEST_LIFTED_SECONDS, 2 * seconds)

    def _begin_limits(self, now: float) -> None:
        """Begin to limit, if evictions have shown the reach of a cache."""
        if not self._are_limits_enabled() or not any(
            each.prefiller_cache.is_capacity_learned for each in self.sets_by_cache.values()
        ):
            return
        self._activate_limits(now)
        for each in self.sets_by_cache.values():
            self._remove_idle_residents(each, now)
            self._change_limit(each, _FIRST_SHARE * each.used_tokens, now)
            each.loss_share = 0.0

    def _activate_limits(self, now: float) -> None:
        self.are_limits_active = True
        self._began = self._waited_at = now
        self._rate_before = self._computed_tokens_per_second(now)
        self._losses, self._failing_since = 0.0, inf

    def _change_limit(self, working_set: WorkingSet, limit: float, now: float) -> None:
        """Lower the limit. Residents wait until the others fit: those with most turns first."""
        working_set.limit_tokens, working_set.changed_at, working_set.grown_at = max(limit, _LEAST_LIMIT), now, now
        self.shed_turn_count += 1
        self._announce_limit(working_set, now, is_lower=True)
        if working_set.used_tokens > working_set.limit_tokens:
            for session in sorted(working_set.resident_tokens, key=_turn_count_of, reverse=True):
                self._discharge_resident(working_set, session, now)
                if working_set.used_tokens <= working_set.limit_tokens:
                    break

    def _end_limits(self, now: float, lifted_seconds: float = 0.0) -> None:
        self._deactivate_limits()
        if self._session_records is not None and self.sets_by_cache:
            change = LimitChange(now, NO_LIMIT, NO_LIMIT, 0.0, lifted_seconds)
            self._session_records.write_record(RecordKind.LIMIT, next(iter(self.sets_by_cache)), (), change)

    def _deactivate_limits(self) -> None:
        self.are_limits_active = False
        for each in self.sets_by_cache.values():
            each.limit_tokens = each.ceiling_tokens = inf
            each.loss_share = 0.0

    def _discharge_resident(self, working_set: WorkingSet, session: CachedSession, now: float) -> None:
        """Remove a resident, for all workers."""
        working_set.discharge_session(session)
        self._announce_session(session, now)

    def _remove_idle_residents(self, working_set: WorkingSet, now: float) -> None:
        """Remove the residents that have been idle for too long."""
        for session in list(working_set.resident_tokens):
            if now - session.idle_since <= self.idle_seconds:
                break
            self._discharge_resident(working_set, session, now)

    # Other workers

    def _announce_session(
        self, session: CachedSession, now: float, computed: tuple[float, float, float] | None = None
    ) -> None:
        """Tell the other workers the state of a session.

        `computed`: the last three numbers of the SessionChange; None: nothing was computed.
        """
        if self._session_records is None or session.prefiller_cache is None:
            return
        place = 2.0 if session.is_placed else 1.0 if session.is_resident else 0.0
        sent_before = max(0.0, min(now - session.sent_at, _LONGEST_LIFTED_SECONDS))
        change = SessionChange(
            *(
                now,
                session.context_tokens,
                session.shared_tokens,
                float(session.last_prefix_key),
                place,
                float(session.turn_count),
            ),
            *(session.idle_since - now, sent_before, *(computed or (0.0, 0.0, 0.0))),
        )
        self._session_records.write_record(
            RecordKind.SESSION, session.prefiller_cache, [session.session_id_key, *session.tail_keys], change
        )

    def _announce_limit(self, working_set: WorkingSet, now: float, is_lower: bool = False) -> None:
        if self._session_records is not None and working_set.limit_tokens < inf:
            ceiling = working_set.ceiling_tokens if working_set.ceiling_tokens < inf else NO_LIMIT
            change = LimitChange(now, working_set.limit_tokens, ceiling, float(is_lower), 0.0)
            self._session_records.write_record(RecordKind.LIMIT, working_set.prefiller_cache, (), change)

    def _announce_waiting(self, turns: int, now: float) -> None:
        if self._session_records is not None and self.sets_by_cache and now - self._reported_at > _REPORT_SECONDS:
            self._reported_at = now
            change = WaitingTurns(now, self._worker_id, float(turns))
            self._session_records.write_record(RecordKind.WAITING, next(iter(self.sets_by_cache)), (), change)

    def apply_record(self, journal_record: JournalRecord, cache: CachedPrefixes) -> None:
        """Apply a record of another worker or gateway about the prefiller with this cache."""
        if journal_record.record_kind == RecordKind.SESSION:
            self._apply_session_change(journal_record.prefix_keys, SessionChange(*journal_record.record_numbers), cache)
        elif journal_record.record_kind == RecordKind.LIMIT:
            self._apply_limit_change(LimitChange(*journal_record.record_numbers), cache)
        else:
            report = WaitingTurns(*journal_record.record_numbers)
            self._reports_by_worker.pop(report.worker_id, None)
            self._reports_by_worker[report.worker_id] = report.reported_at, report.turn_count
            if len(self._reports_by_worker) > _MAX_REPORTS:
                del self._reports_by_worker[next(iter(self._reports_by_worker))]

    def _apply_session_change(self, keys: Sequence[int], session_change: SessionChange, cache: CachedPrefixes) -> None:
        tails = keys[1 : 1 + _MAX_TAILS]
        known = [found for tail in tails if (found := self._by_tail.get(tail)) is not None]
        session = known[-1] if known else self._make_session(keys[0] if keys else 0)
        before = session.prefiller_cache
        if session.is_resident and before is not None and (before is not cache or not session_change.place_state):
            self._working_set_of(before).discharge_session(session)
        self._remember_tails(session, tails)
        session.prefiller_cache = cache
        session.context_tokens = max(0.0, session_change.context_tokens)
        session.shared_tokens = min(session.context_tokens, max(0.0, session_change.shared_tokens))
        session.last_prefix_key = int(session_change.last_prefix_key) or session.last_prefix_key
        session.idle_since = session_change.changed_at + min(session_change.idle_in_seconds, _LONGEST_WAIT)
        session.sent_at = session_change.changed_at - session_change.seconds_since_send
        home = self._working_set_of(cache)
        session.is_placed = session_change.place_state > 1
        if session_change.place_state:
            home.charge_session(session)
            session.turn_count = int(session_change.turn_count)
            if session.is_placed:
                home.placed_session = session
        if session_change.computed_tokens > 0:
            self._record_computed_tokens(session_change.computed_tokens, session_change.changed_at)
        if session_change.expected_tokens >= _MIN_TOKENS:
            self._record_loss(home, min(1.0, max(0.0, session_change.lost_tokens)))

    def _apply_limit_change(self, limit_change: LimitChange, cache: CachedPrefixes) -> None:
        if limit_change.limit_tokens < 0:
            if limit_change.lifted_seconds > 0:
                self._lift_limits(min(limit_change.lifted_seconds, _LONGEST_LIFTED_SECONDS), limit_change.changed_at)
            if self.are_limits_active:
                self._deactivate_limits()
            return
        if not self._are_limits_enabled():
            return
        home = self._working_set_of(cache)
        if not self.are_limits_active:
            self._activate_limits(limit_change.changed_at)
        home.limit_tokens = max(limit_change.limit_tokens, _LEAST_LIMIT)
        home.ceiling_tokens = limit_change.ceiling_tokens if limit_change.ceiling_tokens >= 0 else inf
        home.grown_at = limit_change.changed_at
        if limit_change.is_lowered:
            home.changed_at = limit_change.changed_at
            home.loss_share = 0.0
            self.shed_turn_count += 1

    # Admission

    def session_to_hold(
        self, prefix_keys: Sequence[int], session_id: str | None, client_key_name: str, now: float
    ) -> CachedSession | None:
        """Return the session of a prompt that has to wait, or None if the prompt may go.

        The first prompt of a session never waits, because it may be the only one.
        """
        session = self.find_session(prefix_keys, session_id, now)
        if session is None:
            return None
        session.last_prefix_key = crc32(client_key_name.encode(errors="surrogatepass"))
        self._record_turn(session, now)
        if session.is_resident or (not self._awaits_turn(now) and self._place_session(session, now)):
            return None
        self._waited_at = now
        self._announce_waiting(self.waiting_turn_count + 1, now)
        return session

    def _place_session(self, session: CachedSession, now: float) -> bool:
        """Make a session a resident of the prefiller with most room, if there is enough. Return whether it was."""
        home = max(self._open_sets, key=_free_tokens_of, default=None)
        if home is None:
            return True
        if home.awaits_prompt(now) or home.free_tokens < min(session.own_tokens, _MOST_OF_A_LIMIT * home.limit_tokens):
            return False
        self._make_resident(session, home, now)
        return True

    def _make_resident(self, session: CachedSession, working_set: WorkingSet, now: float) -> None:
        session.prefiller_cache = working_set.prefiller_cache
        session.turn_count = 0
        session.idle_since = now + _LONGEST_WAIT
        session.is_placed = True
        working_set.charge_session(session)
        working_set.placed_session = session
        self._announce_session(session, now)

    def next_sessions(
        self, waiting_sessions: Iterable[tuple[CachedSession, float]], max_wait_seconds: float, now: float
    ) -> list[CachedSession]:
        """Return waiting sessions that may go now. They are residents then.

        Args:
            waiting_sessions: Sessions and the times since when they wait, the oldest first.
            max_wait_seconds: Seconds after which a session takes the place of a resident that has had its turn.
            now: Time of the clock.
        """
        if self._session_records is not None:
            self._session_records.read_others_records()
        if self.are_limits_active and not self._are_limits_enabled():
            self._end_limits(now)
        if not self.are_limits_active:
            return [session for session, _ in waiting_sessions]
        by_key: dict[int, list[tuple[CachedSession, float]]] = {}
        for session, since in waiting_sessions:
            by_key.setdefault(session.last_prefix_key, []).append((session, since))
        if not by_key:
            return []
        self._announce_waiting(self.waiting_turn_count, now)
        homes = sorted(self._open_sets, key=_free_tokens_of, reverse=True)
        used = dict.fromkeys(by_key, 0.0)
        for home in homes:
            for resident, tokens in home.resident_tokens.items():
                if resident.last_prefix_key:
                    used[resident.last_prefix_key] = used.get(resident.last_prefix_key, 0.0) + tokens
        share = sum(home.limit_tokens for home in homes) / len(used)
        may_switch = self.utilisation(now) < _MOST_BUSY_TO_SWITCH
        giving_way = {home: self._find_replaceable_residents(home, used, share, may_switch, now) for home in homes}
        made: list[CachedSession] = []
        for key in sorted(by_key, key=used.__getitem__):
            for session, since in by_key[key][:_LOOKAHEAD]:
                if session.is_resident:  # another turn of it has been admitted
                    made.append(session)
                    continue
                is_impatient = now - since > max_wait_seconds
                if self._place_session(session, now) or self._replace_residents(
                    session, giving_way, used, share, may_switch and is_impatient, now
                ):
                    used[key] += session.own_tokens
                    made.append(session)
                elif is_impatient:
                    break  # the others must not take the room that it waits for
        return made

    def _find_replaceable_residents(
        self,
        working_set: WorkingSet,
        used_tokens: Mapping[int, float],
        limit_share: float,
        may_switch: bool,
        now: float,
    ) -> list[CachedSession]:
        """Return the residents that might give way to some session, those with most turns first."""
        idle_since = now - self.idle_seconds
        residents = [
            resident
            for resident in working_set.resident_tokens
            if resident.idle_since <= now
            and (
                resident.idle_since < idle_since
                or used_tokens.get(resident.last_prefix_key, 0.0) > limit_share
                or (may_switch and resident.turn_count >= _QUANTUM_TURNS)
            )
        ]
        return sorted(residents, key=_turn_count_of, reverse=True)

    def _replace_residents(
        self,
        session: CachedSession,
        giving_way: Mapping[WorkingSet, Sequence[CachedSession]],
        used_tokens: dict[int, float],
        limit_share: float,
        may_switch: bool,
        now: float,
    ) -> bool:
        """Let a session take the place of residents that give way. Return whether it has."""
        is_below = used_tokens[session.last_prefix_key] + session.own_tokens <= limit_share
        for home, residents in giving_way.items():
            if home.awaits_prompt(now):
                continue
            need = min(session.own_tokens, _MOST_OF_A_LIMIT * home.limit_tokens) - home.free_tokens
            leaving = []
            for resident in residents:
                if need <= 0:
                    break
                if (
                    now - resident.idle_since > self.idle_seconds
                    or (
                        is_below
                        and resident.last_prefix_key != session.last_prefix_key
                        and used_tokens.get(resident.last_prefix_key, 0.0) > limit_share
                    )
                    or (may_switch and resident.turn_count >= _QUANTUM_TURNS)
                ):
                    leaving.append(resident)
                    need -= home.resident_tokens[resident]
            if need <= 0:
                for resident in leaving:
                    used_tokens[resident.last_prefix_key] = (
                        used_tokens.get(resident.last_prefix_key, 0.0) - home.resident_tokens[resident]
                    )
                    self._discharge_resident(home, resident, now)
                self._make_resident(session, home, now)
                return True
        return False

    def admit_regardless(self, session: CachedSession, now: float) -> None:
        """Make a session a resident that has waited too long, in place of the residents with most turns."""
        if session.is_resident:
            return
        home = max(self._open_sets, key=_free_tokens_of, default=None)
        if home is None:
            return
        for resident in sorted(home.resident_tokens, key=_turn_count_of, reverse=True):
            if home.free_tokens >= session.own_tokens:
                break
            if resident.idle_since < now:
                self._discharge_resident(home, resident, now)
        self._make_resident(session, home, now)


def _has_lost_prefix(cache: CachedPrefixes, session: CachedSession, prompt: PromptCosts) -> bool:
    """Return whether a prefiller has probably evicted most of a session's prefix, according to its learned capacity."""
    hit = cache.count_cached_pieces(prompt.prefix_keys)
    return cache.is_capacity_learned and (prompt.piece_ends[hit - 1] if hit else 0.0) < session.context_tokens / 2


def _turn_count_of(session: CachedSession) -> int:
    return session.turn_count


def _free_tokens_of(working_set: WorkingSet) -> float:
    return working_set.free_tokens


def _key_of_session_id(session_id: str) -> int:
    """Return the key of a session ID, which is the same in all workers and gateways."""
    return xxh3_64_intdigest(session_id.encode(errors="surrogatepass")) or 1
