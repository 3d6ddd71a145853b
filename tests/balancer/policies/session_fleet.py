"""Prefillers with caches, and sessions that send turns to them, for tests of working sets."""

from __future__ import annotations

from collections.abc import Sequence

from proxy.balancer.pick import PickRequest
from proxy.balancer.policies.prefill_cost import PromptCosts, SentPrompt
from proxy.balancer.policies.prefixes import CachedPrefixes
from proxy.balancer.policies.session_records import SessionRecords
from proxy.balancer.policies.working_sets import CachedSession, WorkingSets
from proxy.common.backend import Load

_REQUEST = PickRequest.make_for_load(Load())
_PATIENCE = 30.0


class Cache(CachedPrefixes):
    """A cache whose evictions have shown its capacity."""

    @property
    def is_capacity_learned(self) -> bool:
        return self.is_learned

    is_learned = True


class Fleet:
    """Prefillers with caches, and sessions that send turns to them. A prompt takes a second for 10,000 tokens."""

    def __init__(self, caches: int = 1, *, is_learned: bool = True, records: SessionRecords | None = None) -> None:
        self.now = 0.0
        self.sets = WorkingSets(lambda: self.is_enabled, lambda: self.caches[: self.enabled], records)
        self.is_enabled = True
        self.caches = [Cache() for _ in range(caches)]
        self.enabled: int | None = None  # number of enabled prefillers; None: all are
        for cache in self.caches:
            cache.is_learned = is_learned

    def send(
        self,
        keys: Sequence[int],
        tokens: int,
        *,
        at: int = 0,
        cached: float = 0.0,
        session: str | None = None,
        ends: bool = True,
    ) -> SentPrompt:
        """Send a prompt. `ends`: it is computed at once."""
        prompt = PromptCosts(_REQUEST, keys, [tokens * (place + 1) / len(keys) for place in range(len(keys))], tokens)
        seconds = tokens / 10_000
        sent = SentPrompt(lambda *_: None, 0, 0, prompt, self.now, seconds, cached, 0.0, (), 0.0, 0, 0.0)
        sent.resident_tokens = self.sets.record_sent_prompt(self.caches[at], prompt, session, sent, False)
        if ends:
            self.sets.record_prompt_end(self.caches[at], sent, self.now)
        return sent

    def turn(self, keys: Sequence[int], tokens: int, *, found: float | None = None, at: int = 0) -> None:
        """Send a prompt and complete it. `found`: share of the expected tokens in the cache. None: not reported."""
        sent = self.send(keys, tokens, at=at, ends=False)
        self.now += 1.0
        if found is not None:
            sent.record_usage(tokens, round(found * sent.resident_tokens))
        self.sets.record_prompt_end(self.caches[at], sent, self.now)

    def thrash(self, sessions: int = 10, tokens: int = 10_000, turns: int = 12, at: int = 0) -> None:
        """Let sessions take turns, each of which has lost its prefix, until there is a limit."""
        for number in range(turns):
            for session in range(sessions):
                if self.sets.are_limits_active:
                    return
                self.turn(chain(session, number), tokens, found=0.0, at=at)

    def holds(self, keys: Sequence[int], key: str = "-") -> CachedSession | None:
        return self.sets.session_to_hold(keys, None, key, self.now)

    def next(self, *waiting: tuple[CachedSession, float]) -> list[CachedSession]:
        return self.sets.next_sessions(waiting, _PATIENCE, self.now)


def chain(session: int, turn: int) -> list[int]:
    """Return the keys of a prompt that extends the prompts of the session's earlier turns."""
    return [session * 1000 + place for place in range(turn + 3)]
