"""Interface of policies: a PickRequest describes the request for a lease, a Candidate an eligible backend.

The chooser passes the eligible backends to the role's policy, and the policy chooses one of them. The facts behind a
choice are kept unchanged, at no cost. `pick_reason` and `pick_figures` evaluate them on demand, after the request has
ended.
"""

from __future__ import annotations

import math
import random
import time
from abc import ABC, abstractmethod
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Final, Generic, Protocol, TypeVar

from proxy.balancer.shared.scoreboard import FEW
from proxy.common.backend import Load, Role
from proxy.wire.prefix import NO_PREFIX_KEYS, PrefixKeys

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

    from proxy.balancer.engines import EngineFacts
    from proxy.balancer.shared.journal import JournalWriter
    from proxy.balancer.shared.scoreboard import Scoreboard
    from proxy.common.backend import Backend
    from proxy.settings import Balance

    ChoiceBasis = tuple["Policy", Sequence[Any], Sequence[int], Any]
    """The policy, its Candidates, their weights at that moment, and the policy's snapshot of them."""
    Pick = tuple[Backend, ChoiceBasis | str]
    """The chosen backend, and the basis of the choice, or its reason if no policy was asked."""
    Columns = tuple[Mapping[str, Sequence[float]], Sequence[float]]
    """A policy's figures by name, each with one number per candidate in their order; and the scores of the candidates.
    The policy prefers lower scores."""
    Figures = tuple[str, Sequence[Any], Mapping[str, Sequence[float]], Sequence[float], int]
    """The policy's label, the examined Candidates, their Columns, and the number of other candidates."""


TRIAL: Final = "trial"
PREFERRED: Final = "preferred"
ONLY_CANDIDATE: Final = "only_candidate"
CACHED_PREFIX: Final = "cached_prefix"
LEAST_SECONDS: Final = "least_seconds"
EQUAL: Final = "equal"
WORKING_SET: Final = "working_set"
OTHER: Final = "other"
REASONS: Final = (
    *(TRIAL, PREFERRED, ONLY_CANDIDATE, CACHED_PREFIX, LEAST_SECONDS, EQUAL),
    *(WORKING_SET, "least_tokens", "round_robin", "power_of_two", "random", "length_groups", OTHER),
)
"""Reasons for a choice.

`trial`: the backend was on probation. `preferred`: an earlier attempt left state there. `only_candidate`: no other was
eligible. `cached_prefix`: without its cache another one would have been as fast. `least_seconds`: it completes first.
`equal`: several were equally good. `working_set`: the request has waited until the cache of this backend had
room for its session. Otherwise the label of a policy that predicts no seconds; `other` for plugins.
"""


def pick_reason(backend_pick: Pick) -> str:
    """Return why a backend was chosen, as one of REASONS."""
    backend, basis = backend_pick
    if isinstance(basis, str):
        return basis
    policy, candidates, _, snapshot = basis
    sets = policy.working_sets
    if len(candidates) == 1 and (sets is None or not sets.are_limits_active):
        return ONLY_CANDIDATE
    why = policy.choice_reason(snapshot, backend)
    return ONLY_CANDIDATE if len(candidates) == 1 and why != WORKING_SET else why


def pick_figures(backend_pick: Pick) -> Figures | None:
    """Return the candidates and the policy's numbers about them, or None if no policy was asked."""
    _, basis = backend_pick
    if isinstance(basis, str):
        return None
    policy, candidates, weights, snapshot = basis
    columns, order = policy.choice_figures(snapshot, weights)
    if len(candidates) <= FEW:
        return policy.policy_name, candidates, columns, order, 0
    examined = policy.examined_candidates(snapshot, candidates)
    return policy.policy_name, examined, columns, order, len(candidates) - len(examined)


class RoutingSubject(Protocol):
    """The parts of a Call that policies may read.

    Each is computed when a policy reads it, so policies that ignore the request cost nothing.
    """

    @property
    def prompt_tokens(self) -> int:
        """Length of the prompt in tokens, estimated from the bytes of text and exact for token IDs."""

    @property
    def output_tokens(self) -> int:
        """Maximum length of the answer in tokens: the client's limit, or the configured estimate."""

    @property
    def prefix_keys(self) -> PrefixKeys:
        """Keys of the prompt's prefixes; empty if the request has several prompts."""

    @property
    def session_id(self) -> str | None:
        """Session ID that the client sends with related requests. None: it sends none."""

    @property
    def first_token_seconds(self) -> float | None:
        """Deadline of the client for the first token, in seconds since its request. None: there is none."""

    def request_texts(self) -> Sequence[str] | None:
        """Return all texts of the request, which an engine may quote in an error. None: they are not known."""

    def requested_priority(self, *, is_lower_first: bool) -> int | None:
        """Return the priority that the client requests. Lower values go first. None: it requests none.

        `is_lower_first`: whether the engines also serve lower values of the request's field first.
        """


@dataclass(slots=True, eq=False)
class PickRequest:
    """Request for a backend. The same object serves the picks of all roles.

    Its fields do not change after its creation; see Call.
    """

    prefill_load: Load
    """Cost on a prefiller or an encoder."""
    decode_load: Load
    """Cost on a decoder."""
    request_subject: RoutingSubject | None = None
    """Parts of the request that policies may read. None: the request is only passed through, and nothing is known."""
    avoided_backends: Collection[Backend] = ()
    """Backends of any role that may not be chosen."""
    preferred_backend: Backend | None = None
    """Backend that is chosen without asking the policy if it is eligible and has room. It has no effect on the choice
    for other roles."""
    proves_generation: bool = True
    """Whether a success shows that the backend can generate. Otherwise it only shows that the backend is reachable."""
    handoff_partner: Backend | None = None
    """Chosen backend of the other role, while pairs are slow. None: unknown, or no pair is slow."""
    computes_prompt: bool = False
    """Whether the decoder computes the prompt, and its answer shows when that has ended."""

    @classmethod
    def make_for_load(
        cls,
        load: Load,
        *,
        avoided_backends: Collection[Backend] = (),
        preferred_backend: Backend | None = None,
        proves_generation: bool = True,
    ) -> PickRequest:
        """Return a request with the same cost for all roles and without a subject."""
        return cls(load, load, None, avoided_backends, preferred_backend, proves_generation)

    @property
    def prompt_tokens(self) -> int:
        """See RoutingSubject; 0 where nothing is known."""
        return 0 if self.request_subject is None else self.request_subject.prompt_tokens

    @property
    def output_tokens(self) -> int:
        """See RoutingSubject; 0 where nothing is known."""
        return 0 if self.request_subject is None else self.request_subject.output_tokens

    @property
    def prefix_keys(self) -> PrefixKeys:
        """See RoutingSubject; empty without a subject."""
        return NO_PREFIX_KEYS if self.request_subject is None else self.request_subject.prefix_keys

    @property
    def session(self) -> str | None:
        return None if self.request_subject is None else self.request_subject.session_id

    @property
    def first_token_seconds(self) -> float | None:
        return None if self.request_subject is None else self.request_subject.first_token_seconds

    def priority(self, *, is_lower_first: bool) -> int | None:
        return (
            None
            if self.request_subject is None
            else self.request_subject.requested_priority(is_lower_first=is_lower_first)
        )

    def load_for_role(self, role: Role) -> Load:
        """Return the cost on a backend of this role, before the policy adjusts it to one backend."""
        return self.decode_load if role is Role.DECODE else self.prefill_load


@dataclass(slots=True, eq=False)
class Candidate:
    """Eligible backend as a policy sees it. The chooser keeps it up to date."""

    backend: Backend
    max_running: int | None
    """Maximum number of running requests. None: there is no limit."""
    scoreboard: Scoreboard = field(repr=False)
    request_share_percent: int = 100
    """Share of its normal requests that it gets: less than 100 because of its weight or during its slow start."""

    @property
    def running_requests(self) -> int:
        """The number of running requests of all workers on the candidate."""
        return self.scoreboard.running_requests(self.backend.slot)

    @property
    def charged_load(self) -> Load:
        """The load that all workers charge to the candidate."""
        return self.scoreboard.load_of(self.backend.slot)

    @property
    def has_room(self) -> bool:
        """Whether it has fewer running requests than its limit."""
        return self.max_running is None or self.scoreboard.running_requests(self.backend.slot) < self.max_running


class HandoffPredictions(Protocol):
    """Predicted times of KV handoffs; see HandoffTimes."""

    @property
    def far_prefillers(self) -> Mapping[str, object]:
        """Prefillers that have only slow pairs, by their keys."""

    def extra_handoff_seconds(
        self, prefiller: Backend, candidates: Sequence[Candidate], prompt_tokens: int
    ) -> list[float] | None:
        """Return by how much each decoder's handoff from a prefiller takes longer than an ordinary one.

        None: no pair of the prefiller is slow.
        """

    def least_extra_handoff_seconds(self, prefillers: Sequence[Backend], prompt_tokens: int) -> list[float]:
        """Return by how much the fastest handoff from each prefiller takes longer than an ordinary one."""


def _unknown_facts(backend: Backend) -> EngineFacts | None:
    return None


def _assume_no_lag(began: float, ended: float) -> float | None:
    return 0.0


@dataclass(slots=True, eq=False)
class PolicyContext:
    """Dependencies of a policy. Each role of each worker has its own."""

    worker_number: int = 0
    """Index of the worker. Policies that take turns start at it, because workers that pick at the same time see equal
    loads."""
    random_source: random.Random = field(default_factory=random.Random)
    clock: Callable[[], float] = time.monotonic
    """Monotonic clock in seconds."""
    facts_of_engine: Callable[[Backend], EngineFacts | None] = _unknown_facts
    """Returns what an engine reports about itself. None: nothing yet."""
    role: Role = Role.PREFILL
    """Role of the backends."""
    journal_writer: JournalWriter | None = None
    """Journal that the policies of all workers write and read. None: there is one worker."""
    others_running_requests: Callable[[Backend], int] | None = None
    """Returns the number of a backend's running requests of other workers. None: there is one worker."""
    loop_lag_within: Callable[[float, float], float | None] = _assume_no_lag
    """Returns the maximum lag of the event loop between two times of the clock, in seconds. None: not measured yet."""
    get_balance_options: Callable[[], Balance] | None = None
    """Returns the current settings. None: use the defaults."""
    handoff_predictions: HandoffPredictions | None = None
    """Learned times of handoffs. None: they are not learned."""


@dataclass(slots=True, eq=False)
class PickPrediction:
    """The predicted outcome of choosing a backend."""

    predicted_seconds: float
    """Time until the backend has completed its part of the request."""
    cached_tokens: int
    """Tokens of the prompt that are in the backend's prefix cache."""


class SessionLimits(Protocol):
    """Limits on the sessions that use prefix caches at the same time; see WorkingSets. Sessions are opaque keys."""

    are_limits_active: bool
    """Whether sessions may have to wait now."""
    waiting_turn_count: int
    """Number of turns that wait. The queue updates it."""
    shed_turn_count: int
    """Changes when sessions may have lost their place."""

    @property
    def resident_count(self) -> int:
        """The number of sessions whose prefixes stay cached."""

    def session_to_hold(
        self, prefix_keys: Sequence[int], session_id: str | None, client_key_name: str, now: float
    ) -> Any:
        """Return the session of a prompt that has to wait, or None. `client_key_name`: name of the client key."""

    def next_sessions(
        self, waiting_sessions: Iterable[tuple[Any, float]], max_wait_seconds: float, now: float
    ) -> list[Any]:
        """Return the waiting sessions that may go now. `waiting_sessions`: each with the time since when it waits."""

    def admit_regardless(self, session: Any, now: float) -> None:
        """Give a place to a session that has waited too long."""

    def record_client_gone(self, session: Any, now: float) -> None:
        """Note that the client of a waiting turn has left."""

    def take_token_counts(self) -> tuple[float, float]:
        """Return the tokens that sessions should have found in caches, and the evicted part, since the last call."""


class GapCounter(Protocol):
    """Counts the gaps between an answer's tokens."""

    @property
    def timed_gaps(self) -> int:
        """Number of the timed gaps so far, one of eight."""


class LeaseTracker:
    """Follows one request on one backend for a policy.

    The lease calls its methods in the order in which they are defined here. A policy overrides the ones that it needs.
    """

    policy_prediction: PickPrediction | None = None
    """Predicted outcome. None: the policy predicts nothing."""

    def __init__(self, load: Load) -> None:
        self.compute_charge, self.kv_charge = load
        """Load that the backend is charged with until the lease frees it; see Load."""

    def record_usage(self, prompt_tokens: int, cached_tokens: int | None) -> None:
        """Note the length of the prompt and the cached part that the backend reports. None: it does not report that."""

    def record_first_token(self, gap_counter: GapCounter | None = None) -> None:
        """Record the first part of a decoder's answer. `gap_counter` None: its tokens are not timed."""

    def record_end(self, is_served: bool, answer_tokens: int | None) -> None:
        """Note the end of the backend's work, as soon as it is known. It is called once.

        Args:
            is_served: Whether the backend has completed its part. Otherwise it failed, or the client disconnected.
            answer_tokens: Length of a decoder's complete answer. None: unknown.
        """


class Policy(ABC):
    """Chooses a backend for each request of one role, in one worker. It never waits.

    Only `choose_candidate` is required. The pool does not call `load_of_request`, `start_tracker` and `has_room` of a
    policy that does not override them.
    """

    policy_name: ClassVar[str] = OTHER
    """Name in receipts and metrics."""
    uses_load_weights: ClassVar[bool] = True
    """Whether a backend with a larger weight gets fewer requests. It decides how slow start is applied."""
    keeps_weights: ClassVar[bool] = True
    """Whether `pick_figures` needs the weights of the choice. Otherwise they are not copied."""
    load_weights: ClassVar[tuple[int, int] | None] = None
    """Weights of a compute token and of a KV token in a backend's weight. None: those of the role."""
    choice_snapshot: Any = None
    """Facts about the candidates of the last choice, for later calls of `pick_reason` and `pick_figures`. It is kept as
    long as the request, so it must be small, and must not be modified."""

    def __init__(self, context: PolicyContext | None = None) -> None:
        self.context = context or PolicyContext()
        self.working_sets: SessionLimits | None = None
        """Working sets that hold back turns of sessions. None: nothing holds them back."""

    @abstractmethod
    def choose_candidate(
        self, candidates: Sequence[Candidate], weights: Sequence[int], request: PickRequest
    ) -> Candidate:
        """Return one of the candidates for a request.

        It may be called twice for one pick, the second time without full backends, and for picks that come to nothing.
        So it must not record the request; `start_tracker` does that.

        Args:
            candidates: At least one backend, in slot order.
            weights: Load of each candidate as one number. It is raised for backends with less than a full share. The
                list may change after the call.
            request: The request.
        """

    def load_of_request(self, backend: Backend, request: PickRequest) -> Load:
        """Return the load that the request adds to this backend, for policies without `start_tracker`."""
        return request.load_for_role(backend.role)

    def start_tracker(self, backend: Backend, request: PickRequest) -> LeaseTracker:
        """Return the tracker of a lease that begins now."""
        return LeaseTracker(self.load_of_request(backend, request))

    def learned_max_running(self, backend: Backend) -> int | None:
        """Return the learned maximum of running requests for a backend. None: there is no learned limit."""
        return None

    def queue_relief_seconds(self, candidates: Sequence[Candidate], request: PickRequest) -> float:
        """Return the seconds that all queued requests together gain if the backends need not serve this one."""
        return 0.0

    def queue_wait_seconds(self, candidates: Sequence[Candidate], request: PickRequest) -> float:
        """Return the predicted time that a new request would wait for the requests in the queue, in seconds."""
        return 0.0

    def record_local_turn(self, request: PickRequest) -> None:  # noqa: B027 - optional
        """Note that a decoder computes the prompt of a request, so that no backend of this role gets it."""

    def predicted_prefill_seconds(self, uncached_tokens: float, cached_tokens: float) -> float | None:
        """Return the predicted time of a prefill on a backend of normal speed. None: not known."""
        return None

    @property
    def append_harm_per_second(self) -> float | None:
        """Seconds that a running answer loses per second in which its decoder computes a prompt. None: not known."""
        return None

    def answers_within_pace(self, token_seconds: float) -> float | None:
        """Return the number of running answers at which a token takes this time. None: not known."""
        return None

    def forget_cache(self, backend: Backend) -> None:  # noqa: B027 - optional
        """Note that a backend's caches are empty: it is unreachable, was restarted, or has left. Calls may repeat."""

    def choice_reason(self, snapshot: Any, backend: Backend) -> str:
        """Return the reason for a choice among several candidates, as one of REASONS.

        `snapshot`: the policy's snapshot of that choice.
        """
        return self.policy_name

    def examined_candidates(self, snapshot: Any, candidates: Sequence[Candidate]) -> Sequence[Candidate]:
        """Return the candidates that the figures of a choice are about. The others are idle and not better.

        It is called for more than FEW candidates. The figures of fewer are always about all.
        """
        return candidates

    def choice_figures(self, snapshot: Any, weights: Sequence[int]) -> Columns:
        """Return the figures that explain a choice in receipts.

        `snapshot` and `weights`: those of that choice; no weights unless `keeps_weights`.
        """
        return {"weight": weights}, weights

    def working_set_tokens(self, backend: Backend) -> Mapping[str, float]:
        """Return the tokens that sessions use in the cache of a backend, and their limit, as far as known."""
        return {}

    @property
    def remembered_prefixes(self) -> int:
        """The number of prefix keys that the policy keeps."""
        return 0

    def soonest_completion_seconds(self, candidates: Sequence[Candidate], request: PickRequest) -> float | None:
        """Return the shortest time in which a candidate would complete the request. None: unknown."""
        return None

    # For the queue in front of all backends.

    def has_room(self, candidates: Sequence[Candidate]) -> bool:
        """Return whether a request might go to a candidate now. A candidate at its limit does not count.

        A policy that overrides this controls the queue. Only then the methods below are called.
        """
        return any(candidate.has_room for candidate in candidates)

    def would_take_ignoring_learned(self, candidates: Sequence[Candidate]) -> bool:
        """Return whether a candidate is below its limit, ignoring learned limits."""
        return any(candidate.has_room for candidate in candidates)

    def max_hold_seconds(self, request: PickRequest | None, waiting_count: int) -> float:
        """Return the maximum time that a request should wait because of a learned limit.

        Args:
            request: The request. None: unknown.
            waiting_count: Number of waiting requests, including this one.

        Returns:
            Seconds since it began to wait; infinite if no such limit makes it wait now.
        """
        return math.inf

    def should_admit_first(self, candidates: Sequence[Candidate], request: Callable[[], PickRequest]) -> bool:
        """Return whether the first request of the queue should go now, and not wait for a better backend."""
        return self.has_room(candidates) and self.index_to_admit(candidates, [request()]) is not None

    def shortest_work_seconds(self, candidates: Sequence[Candidate], request: PickRequest) -> float:
        """Return the shortest time that a request takes on any candidate, and note that it waits from now on.

        Shorter requests leave the queue first. 0: requests leave in their order.
        """
        return 0.0

    def on_left_queue(self, request: PickRequest) -> None:  # noqa: B027 - optional
        """Note that a request has left the queue, with or without a lease."""

    def index_to_admit(self, candidates: Sequence[Candidate], waiting_requests: Sequence[PickRequest]) -> int | None:
        """Return the index of the first waiting request that should go now; its backend is then chosen at once.

        None: each should wait for a backend that has no room yet.
        """
        return 0


T = TypeVar("T")


class PendingSamples(Generic[T]):
    """Samples of one kind that wait until the lag of the event loop is known, oldest first."""

    def __init__(
        self,
        context: PolicyContext,
        *,
        max_lag_seconds: float = 0.05,
        max_lag_share: float = 0.1,
        capacity: int = 256,
    ) -> None:
        """Create a queue without samples.

        Args:
            context: Returns the lag of the event loop.
            max_lag_seconds: A sample is timely if the lag was at most this while it was taken.
            max_lag_share: The lag must also be at most this share of the sample's duration.
            capacity: If more samples wait, the oldest one counts as late.
        """
        self._context = context
        self._max_lag_seconds = max_lag_seconds
        self._max_lag_share = max_lag_share
        self._capacity = capacity
        self._waiting_samples: deque[tuple[T, float, float]] = deque()

    def __len__(self) -> int:
        return len(self._waiting_samples)

    def add_sample(self, sample: T, began_at: float, ended_at: float) -> None:
        """Add a sample, taken between these two times of the clock."""
        self._waiting_samples.append((sample, began_at, ended_at))

    def take_settled(self) -> Iterator[tuple[T, float, bool]]:
        """Remove the samples whose lag is known. Yield each sample, the time of its end, and whether it is timely."""
        waiting, lag_within = self._waiting_samples, self._context.loop_lag_within
        while waiting:
            sample, began, ended = waiting[0]
            lag = lag_within(began, ended)
            if lag is None and len(waiting) <= self._capacity:
                return
            waiting.popleft()
            most = min(self._max_lag_seconds, self._max_lag_share * (ended - began))
            yield sample, ended, lag is not None and lag <= most
