"""What follows from a canary's numbers: where its KV cache came from, and whether two answers are the same. Pure."""

from __future__ import annotations

from enum import Enum, auto
from typing import TYPE_CHECKING, Final

from proxy.balancer.handoff_verdicts import HandoffVerdict, judge
from proxy.balancer.shared.scoreboard import HandoffCount

if TYPE_CHECKING:
    from collections.abc import Sequence

    from proxy.wire.exposition import PromptTokens

# Where the counters grew by more than this share of the prompt others ask the engine, too.
_OTHERS_SHARE: Final = 1.5
_CACHED_SHARE: Final = 0.5
# A hand-over that takes as long as a prefill most likely was one. Shorter prefills cannot be told from anything else.
_SLOW_SHARE: Final = 0.75
_LEAST_SECONDS: Final = 0.25
# What is decided by the order of additions is decided later.
_SURE_TOKENS: Final = 3
_SURE_CHARACTERS: Final = 8


class Agreement(Enum):
    """How alike two greedy answers to one prompt are."""

    SAME = auto()
    DRIFTS = auto()
    """They begin alike. Kernels that add in another order can have done that."""
    DIFFERS = auto()


def agreement(one: Sequence[int] | str, other: Sequence[int] | str) -> Agreement:
    """How alike two greedy answers to one prompt are. Both are lists of token ids, or both are text."""
    if one == other:
        return Agreement.SAME
    alike = next(
        (at for at, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), min(len(one), len(other))
    )
    sure = _SURE_CHARACTERS if isinstance(one, str) else _SURE_TOKENS
    return Agreement.DRIFTS if alike >= sure else Agreement.DIFFERS


def by_counters(
    before: PromptTokens | None, after: PromptTokens | None, tokens: int, *, from_store: bool
) -> HandoffVerdict | None:
    """What became of a canary of so many prompt tokens by the decoder's counters around it. None: they have not counted
    it yet.
    """
    if before is None or after is None:
        return HandoffVerdict.UNKNOWN
    grown = [new - old for new, old in zip(after, before, strict=True)]
    if min(grown) >= 0 and sum(grown) < _CACHED_SHARE * tokens:
        return None
    verdict = judge(before, after, HandoffCount(1, tokens), from_store=from_store, least=1)
    _, _, cached = grown
    is_others = verdict is HandoffVerdict.TRANSFERRED and sum(grown) > _OTHERS_SHARE * tokens
    is_cached = verdict is HandoffVerdict.COMPUTED and cached >= _CACHED_SHARE * tokens
    return HandoffVerdict.UNKNOWN if verdict is None or is_others or is_cached else verdict


def by_usage(cached_tokens: int | None, tokens: int) -> HandoffVerdict:
    """The verdict on a hand-over by the decoder's usage: TRANSFERRED or UNKNOWN. The prompt of `tokens` tokens was not
    in any cache, so `cached_tokens` were fetched; None: it does not tell, as vLLM does not where there are 0.
    """
    return HandoffVerdict.TRANSFERRED if (cached_tokens or 0) >= _CACHED_SHARE * tokens else HandoffVerdict.UNKNOWN


def by_time(handoff_seconds: float | None, alone_seconds: float | None) -> HandoffVerdict:
    """What became of it by how long the first token took after a hand-over, and by a decoder alone; None: not known."""
    if handoff_seconds is None or alone_seconds is None or alone_seconds < _LEAST_SECONDS:
        return HandoffVerdict.UNKNOWN
    return HandoffVerdict.COMPUTED if handoff_seconds >= _SLOW_SHARE * alone_seconds else HandoffVerdict.TRANSFERRED
