"""Interface of policies: a PickRequest describes the request for a lease, a Candidate an eligible backend.

The chooser passes the eligible backends to the role's policy, and the policy chooses one of them. The facts behind a
choice are kept unchanged, at no cost. `reason` and `figures` evaluate them on demand, after the request has ended.
"""

from __future__ import annotations

import math
import random
import time
from abc import ABC, abstractmethod
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Final, Generic, Protocol, TypeVar

from proxy.common.backend import Load, Role
from proxy.wire.prefix import NO_KEYS, PrefixKeys

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    from proxy.balancer.engines import EngineFacts
    from proxy.balancer.shared.journal import JournalWriter
    from proxy.balancer.shared.scoreboard import Scoreboard
    from proxy.common.backend import Backend
    from proxy.settings import Balance

    ChoiceBasis = tuple["Policy", Sequence[Any], Sequence[int], Any]
    """The policy, the Candidates that it was shown, their weights at that moment, and what it has snapshot of them."""
    Pick = tuple[Backend, ChoiceBasis | str]
    """The backend that was chosen, and what was basis at, or else why nothing had to be."""
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


def reason(pick: Pick) -> str:
    """Return why a backend was chosen, as one of REASONS."""
    backend, basis = pick
    if isinstance(basis, str):
        return basis
    policy, candidates, _, snapshot = basis
    return ONLY_CANDIDATE if len(candidates) == 1 else policy.reason(snapshot, backend)


def figures(pick: Pick) -> Figures | None:
    """Return the candidates and the policy's numbers about them, or None if no policy was asked."""
    _, basis = pick
    if isinstance(basis, str):
        return None
    policy, candidates, weights, snapshot = basis
    columns, order = policy.figures(snapshot, weights)
    return policy.label, candidates, columns, order


class Subject(Protocol):
    """What a policy may know of the request itself: a Call, as far as it is shown to the balancer.

    All of it is worked out when a policy asks, so that policies which do not look at requests pay nothing for it.
    """

    @property
    def prompt_tokens(self) -> int:
        """Estimated from the text's bytes, exact for token ids."""

    @property
    def output_tokens(self) -> int:
        """The client's limit, or the configured guess."""

    @property
    def prefix_keys(self) -> PrefixKeys:
        """What the prompt's prefixes are called; empty where the request has no single prompt."""

    @property
    def session(self) -> str | None:
        """What the client calls those of its requests that have much in common; None: it calls them nothing."""

    @property
    def first_token_seconds(self) -> float | None:
        """How soon the client wants the first token after its request; None: it does not say."""

    def priority(self, *, lower_first: bool) -> int | None:
        """How urgent the client says it is: lower goes first; None: it does not say. `lower_first`: so do engines read
        what they are told.
        """


@dataclass(slots=True, eq=False)
class PickRequest:
    """What a backend of some role is wanted for. The same one serves the picks of all roles.

    Nothing of it is ever set again; see Call.
    """

    prefill: Load
    """What it costs a prefiller or an encoder."""
    decode: Load
    """What it costs a decoder."""
    subject: Subject | None = None
    """Whose properties this one has as its own. None: nothing is known, as of a request that is only passed on."""
    avoid: Collection[Backend] = ()
    """Backends of any role that must not be chosen."""
    prefer: Backend | None = None
    """Chosen if it may be and has room, whatever the policy would say; backends of other roles are chosen freely."""
    proves_generation: bool = True
    """How the request ends shows whether the backend generates; otherwise only whether there was a connection."""

    @classmethod
    def of(
        cls,
        load: Load,
        *,
        avoid: Collection[Backend] = (),
        prefer: Backend | None = None,
        proves_generation: bool = True,
    ) -> PickRequest:
        """A request that costs a backend `load`, whatever its role, and about which no more is known."""
        return cls(load, load, None, avoid, prefer, proves_generation)

    def avoiding(self, avoid: Collection[Backend]) -> PickRequest:
        """The same, but these are avoided and no others."""
        return PickRequest(self.prefill, self.decode, self.subject, avoid, self.prefer, self.proves_generation)

    def for_another_backend(self, avoid: Collection[Backend]) -> PickRequest:
        """The same for another backend than before: these are avoided and no others, and none is preferred."""
        return PickRequest(self.prefill, self.decode, self.subject, avoid, None, self.proves_generation)

    @property
    def prompt_tokens(self) -> int:
        """See Subject; 0 where nothing is known."""
        return 0 if self.subject is None else self.subject.prompt_tokens

    @property
    def output_tokens(self) -> int:
        """See Subject; 0 where nothing is known."""
        return 0 if self.subject is None else self.subject.output_tokens

    @property
    def prefix_keys(self) -> PrefixKeys:
        """See Subject; empty where nothing is known."""
        return NO_KEYS if self.subject is None else self.subject.prefix_keys

    @property
    def session(self) -> str | None:
        """See Subject."""
        return None if self.subject is None else self.subject.session

    @property
    def first_token_seconds(self) -> float | None:
        """See Subject."""
        return None if self.subject is None else self.subject.first_token_seconds

    def priority(self, *, lower_first: bool) -> int | None:
        """See Subject."""
        return None if self.subject is None else self.subject.priority(lower_first=lower_first)

    def load(self, role: Role) -> Load:
        """What it costs a backend of this role, as far as that does not depend on which one it is."""
        return self.decode if role is Role.DECODE else self.prefill


@dataclass(slots=True, eq=False)
class Candidate:
    """An eligible backend, as a policy sees it. The chooser keeps it up to date."""

    backend: Backend
    limit: int | None
    """Requests it works on at a time; None: any number."""
    scoreboard: Scoreboard = field(repr=False)
    share_percent: int = 100
    """How many of the requests that it would get otherwise: less than 100 by its weight, or while it starts slowly."""

    @property
    def running(self) -> int:
        """Requests it works on, of all workers."""
        return self.scoreboard.running(self.backend.slot)

    @property
    def load(self) -> Load:
        """What it is charged with, by all workers."""
        return self.scoreboard.load(self.backend.slot)

    @property
    def has_room(self) -> bool:
        """Whether it is below its limit."""
        return self.limit is None or self.scoreboard.running(self.backend.slot) < self.limit


def _unknown(backend: Backend) -> EngineFacts | None:
    return None


def _never_late(began: float, ended: float) -> float | None:
    return 0.0


@dataclass(slots=True, eq=False)
class PolicyContext:
    """What a policy may use. Each worker has its own, and so has each role."""

    worker: int = 0
    """The number of the worker, for what takes turns: workers that pick at the same moment see the same loads."""
    rng: random.Random = field(default_factory=random.Random)
    clock: Callable[[], float] = time.monotonic
    """Seconds."""
    facts: Callable[[Backend], EngineFacts | None] = _unknown
    """What the engine says of itself; None: nothing yet."""
    role: Role = Role.PREFILL
    """Whom it chooses."""
    journal: JournalWriter | None = None
    """Where a policy tells those of the other workers what they should know; None: there are no others."""
    others_running: Callable[[Backend], int] | None = None
    """Requests that a backend works on for other workers; None: there are none."""
    lag_within: Callable[[float, float], float | None] = _never_late
    """The most seconds by which the event loop was late between two times of the clock; None: not known yet."""
    balance: Callable[[], Balance] | None = None
    """Returns the settings of now; None: they are the default ones."""


@dataclass(slots=True, eq=False)
class Prediction:
    """What a policy thought would come of a choice."""

    seconds: float
    """Until the backend has done its work."""
    cached_tokens: int
    """Of the prompt, that it would find in its cache."""


class Tracker:
    """How a policy follows a request that it has sent to a backend: the lease tells it what becomes of the request, in
    this order. What a policy does not want to hear it does not override.
    """

    __slots__ = ("compute", "kv")

    prediction: Prediction | None = None
    """What will come of it; None: nothing is predicted."""

    def __init__(self, load: Load) -> None:
        self.compute, self.kv = load
        """What the backend is charged with until it is given back, see Load."""

    def note_usage(self, prompt_tokens: int, cached_tokens: int | None) -> None:
        """The backend has told how long the prompt was, and how much of it was in its prefix cache; None: not that."""

    def note_first_token(self) -> None:
        """A decoder has sent the first of the answer."""

    def note_end(self, served: bool, answer_tokens: int | None) -> None:
        """The backend has done its work for the request (`served`), or will not: it failed, or the client left.
        `answer_tokens`: of a decoder's answer that is complete, if they are known.

        Comes once, in the moment in which it is known: of a prefiller when it has answered.
        """


class Policy(ABC):
    """Chooses a backend for each request of one role, in one worker. It never waits.

    `choose` is all that it must have. A policy that overrides none of the other methods is not called for them.
    """

    label: ClassVar[str] = OTHER
    """What receipts and metrics call it."""
    weighs_load: ClassVar[bool] = True
    """Whether a larger weight means fewer requests: it decides how a backend that came back is spared."""
    weights: ClassVar[tuple[int, int] | None] = None
    """What a token of compute and a token of KV count in the load of a backend in one number; None: what is usual for
    the role."""
    snapshot: Any = None
    """What it has basis at when it last chose, for `reason` and `figures`, which are asked much later. Never changed
    again, and small: it is kept as long as the request."""

    def __init__(self, context: PolicyContext | None = None) -> None:
        self.context = context or PolicyContext()

    @abstractmethod
    def choose(self, candidates: Sequence[Candidate], weights: Sequence[int], request: PickRequest) -> Candidate:
        """One of the candidates, which come in slot order, and never none. `weights`: the load of each in one number,
        lower is freer; it is raised where the backend is to get less than its share.

        It may be asked a second time for one pick, without those that have no room, and for picks that come to nothing:
        what is remembered of a request is for `track` to remember.
        """

    def cost_of(self, backend: Backend, request: PickRequest) -> Load:
        """What the request costs this backend. It is charged until it is given back, where nothing is tracked."""
        return request.load(backend.role)

    def track(self, backend: Backend, request: PickRequest) -> Tracker:
        """A lease begins: the backend is about to get the request. Returns what hears of it from now on."""
        return Tracker(self.cost_of(backend, request))

    def most_running(self, backend: Backend) -> int | None:
        """How many requests a backend had better have at most, by what was learned; None: any number."""
        return None

    def forget_cache(self, backend: Backend) -> None:  # noqa: B027 - nor need this
        """Its caches are empty: it does not take connections, has started anew, or has left. May come many times."""

    def reason(self, snapshot: Any, backend: Backend) -> str:
        """Why it has chosen this one of several, in one of choice.REASONS. `snapshot`: as it was then."""
        return self.label

    def figures(self, snapshot: Any, weights: Sequence[int]) -> Columns:
        """What it knew of the candidates, whose weights were these. `snapshot`: as it was then."""
        return {"weight": weights}, weights

    @property
    def remembered(self) -> int:
        """How many keys of prefixes it keeps."""
        return 0

    def soonest_seconds(self, candidates: Sequence[Candidate], request: PickRequest) -> float | None:
        """When the soonest of them would have done its work for the request, from now on; None: it does not know."""
        return None

    # For the queue in front of all backends.

    def has_room(self, candidates: Sequence[Candidate]) -> bool:
        """Whether some request might go to one of them now rather than wait; one that is at its limit does not count.
        A policy that overrides this holds the queue: only then the next four are asked.
        """
        return any(candidate.has_room for candidate in candidates)

    def would_take(self, candidates: Sequence[Candidate]) -> bool:
        """Return whether an engine would take a request now: some candidate is below its limit, learned ones aside."""
        return any(candidate.has_room for candidate in candidates)

    def hold_seconds(self, request: PickRequest | None, waiting: int) -> float:
        """Return how long at most a request should wait because of a limit that was learned.

        Args:
            request: None if it is not known.
            waiting: The requests that wait, this one included.

        Returns:
            Seconds since it began to wait; infinite if no such limit makes it wait now.
        """
        return math.inf

    def admits(self, candidates: Sequence[Candidate], request: Callable[[], PickRequest]) -> bool:
        """Whether a request that nobody is in front of goes now: there is room, and nothing better to wait for."""
        return self.has_room(candidates) and self.first_to_admit(candidates, [request()]) is not None

    def work_seconds(self, candidates: Sequence[Candidate], request: PickRequest) -> float:
        """What the request takes where it takes least: of those who wait the shorter go first. 0: in turn. It waits
        from now on.
        """
        return 0.0

    def left_queue(self, request: PickRequest) -> None:  # noqa: B027 - need not be overridden
        """It has left the queue: for a lease, or for good."""

    def first_to_admit(self, candidates: Sequence[Candidate], waiting: Sequence[PickRequest]) -> int | None:
        """Of those who wait, in their order, the place of the first that should go now; None: all had better wait for
        who has no room yet. It is then chosen for, at once.
        """
        return 0


T = TypeVar("T")


class PendingSamples(Generic[T]):
    """Samples of one kind, the oldest first."""

    def __init__(
        self, context: PolicyContext, *, most_lag_seconds: float, most_lag_share: float, capacity: int
    ) -> None:
        """Create an empty queue.

        Args:
            context: Knows how late the event loop was.
            most_lag_seconds: A sample is timely if the loop was never later than this while it was taken,
            most_lag_share: and never later than this share of the sample's time.
            capacity: With more samples that wait the oldest one counts as late.
        """
        self._context = context
        self._most_lag_seconds = most_lag_seconds
        self._most_lag_share = most_lag_share
        self._capacity = capacity
        self._waiting: deque[tuple[T, float, float]] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, sample: T, began: float, ended: float) -> None:
        """Add a sample that was taken between these times of the clock."""
        self._waiting.append((sample, began, ended))

    def settled(self) -> Iterator[tuple[T, float, bool]]:
        """Remove the samples of which it is known; yield each, when it ended, and whether it is timely."""
        waiting, lag_within = self._waiting, self._context.lag_within
        while waiting:
            sample, began, ended = waiting[0]
            lag = lag_within(began, ended)
            if lag is None and len(waiting) <= self._capacity:
                return
            waiting.popleft()
            most = min(self._most_lag_seconds, self._most_lag_share * (ended - began))
            yield sample, ended, lag is not None and lag <= most
