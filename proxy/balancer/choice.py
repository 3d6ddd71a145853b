"""Why a backend was chosen. What was looked at is kept as it was, at no cost; what follows from it is worked out when
somebody asks, after the request is over.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Final, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from proxy.common.backend import Backend

    Looked = tuple["Explains", Sequence[Any], Sequence[int], Any]
    """The policy, the Candidates that it was shown, their weights at that moment, and what it has noted of them."""
    Pick = tuple[Backend, Looked | str]
    """The backend that was chosen, and what was looked at, or else why nothing had to be."""
    Columns = tuple[Mapping[str, Sequence[float]], Sequence[float]]
    """What a policy knew of candidates, in columns by name, each with their numbers in their order; and how it would
    choose: the lower a number, the rather."""
    Figures = tuple[str, Sequence[Any], Mapping[str, Sequence[float]], Sequence[float]]
    """The policy's label, the Candidates, and their Columns."""

TRIAL: Final = "trial"
PREFERRED: Final = "preferred"
ONLY_CANDIDATE: Final = "only_candidate"
CACHED_PREFIX: Final = "cached_prefix"
LEAST_SECONDS: Final = "least_seconds"
EQUAL: Final = "equal"
OTHER: Final = "other"
REASONS: Final = (
    *(TRIAL, PREFERRED, ONLY_CANDIDATE, CACHED_PREFIX, LEAST_SECONDS, EQUAL),
    *("least_tokens", "round_robin", "power_of_two", "random", "length_groups", OTHER),
)
"""Why: it had to show that it is well again; an attempt before has left something there; there was no other; without
what is cached another one would have been as soon; it was soonest; several could not be told apart; or a policy that
knows no seconds said so, of which those that are not in the table are `other`."""


class Explains(Protocol):
    """What a Policy is for this."""

    label: ClassVar[str]

    def reason(self, noted: Any, backend: Backend) -> str:
        """See Policy."""

    def figures(self, noted: Any, weights: Sequence[int]) -> Columns:
        """See Policy."""


def reason(pick: Pick) -> str:
    """One of REASONS."""
    backend, looked = pick
    if isinstance(looked, str):
        return looked
    policy, candidates, _, noted = looked
    return ONLY_CANDIDATE if len(candidates) == 1 else policy.reason(noted, backend)


def figures(pick: Pick) -> Figures | None:
    """What there was to choose from; None: nothing was looked at."""
    _, looked = pick
    if isinstance(looked, str):
        return None
    policy, candidates, weights, noted = looked
    columns, order = policy.figures(noted, weights)
    return policy.label, candidates, columns, order
