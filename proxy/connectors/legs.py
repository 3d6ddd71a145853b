"""The steps of one attempt, without IO: the legs, the data-parallel ranks they go to, and the resulting Attempt.

A protocol writes the order of its steps once, as a generator (`Legs`). `leg_driver.LegDriver` performs them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Protocol, Self

from proxy.common.errors import UpstreamError
from proxy.common.terms import Stage

if TYPE_CHECKING:
    from array import array
    from collections.abc import Awaitable, Callable, Generator, Mapping
    from types import TracebackType

    from proxy.balancer.pick import GapCounter
    from proxy.common.backend import Backend
    from proxy.dialects.base import PrefillAnswer
    from proxy.observe.timeline import Timeline
    from proxy.upstream import Response
    from proxy.wire.document import Body

_STREAM_STAGE: Final = Stage.STREAM  # reading a member off its class takes as long as four calls

RANK_HEADER: Final = "x-data-parallel-rank"
"""Name of the request header that selects a data-parallel rank (vLLM `_get_data_parallel_rank`, since 0.11).

vLLM answers 400 to a number that no rank has (v1/engine/input_processor.py). An engine that serves one rank at its
address accepts only 0.
"""


class KvOutcomeListener(Protocol):
    """Receives the outcome of the handoff of an attempt's KV cache."""

    def record_kv_arrival(self, gap_counter: GapCounter | None = None) -> None:
        """Record the decoder's first output. It shows that the prefiller no longer has to keep the KV cache.

        May be called again.
        """

    def record_kv_loss(self) -> None:
        """Record that the decoder gave up before its first output. It may have failed to fetch the KV cache.

        May be called again.
        """

    def keep_answer_kv(self, params: Any, ids: array[int] | None) -> None:
        """Record the KV parameters of a complete answer, whose KV cache the decoder keeps, and all token ids.

        `ids`: those of the prompt and the answer; None if they are not known for certain.
        """


@dataclass(slots=True, eq=False)
class Attempt:
    """One attempt at a call whose decoder has answered with status 200, and the attempt's leases."""

    response: Response
    timeline: Timeline
    prefiller: Backend | None
    """The prefiller; None if the connector has no prefill leg."""
    has_kv_from_prefiller: bool
    """Whether the decoder got its KV cache from a prefiller. If so, the decoder's `prompt_tokens_details` are wrong."""
    handoff: KvOutcomeListener
    first_token_seconds: float | None = None
    """Time limit in seconds for the decoder's first output, if the prefill still runs when the decoder answers.

    None: `timeouts.first_token_seconds`, which is shorter.
    """
    prefill_answer: PrefillAnswer | None = None
    """The prefiller's answer; None if the client needs nothing from it, or if no other engine takes part."""

    @property
    def prompt_tokens(self) -> int | None:
        """The number of tokens in the prompt; None until an engine reports it."""
        return self.timeline.usage.prompt_tokens

    @property
    def prompt_tokens_details(self) -> dict[str, Any] | None:
        """The correct `prompt_tokens_details`, as an engine reported them; None if no engine reported correct ones."""
        return self.timeline.usage.prompt_details

    def record_usage(self, usage: Any) -> None:
        """Record the `usage` of the decoder's answer.

        Its counts of the prompt are used only if the decoder computed the prompt. Otherwise decoders report the KV
        cache from the prefiller as cached.
        """
        self.timeline.usage.add_completion_usage(usage)
        if not self.has_kv_from_prefiller:
            self.timeline.usage.add_prompt_usage(usage)

    def record_kv_arrival(self, gap_counter: GapCounter | None = None) -> None:
        """Record the decoder's first output. It shows that the prefiller no longer has to keep the KV cache.

        May be called again, by the next reader of the same stream.
        """
        self.handoff.record_kv_arrival(gap_counter)
        stages = self.timeline.entered_stages
        if not stages or stages[-1] is not _STREAM_STAGE:
            self.timeline.enter_stage(_STREAM_STAGE)

    def record_kv_loss(self) -> None:
        """Record that the decoder gave up before its first output. It may have failed to fetch the KV cache."""
        self.handoff.record_kv_loss()
        self.timeline.enter_stage(_STREAM_STAGE)


@dataclass(slots=True, eq=False)
class EngineLeg:
    """One request to one engine; see Upstream.post_and_await_head."""

    backend: Backend
    path: str
    body: Body
    headers: Mapping[str, str]
    """Request headers, with lower-case names."""
    answer_seconds: float
    """Time limit in seconds until the answer begins, or until it is complete if `wants_whole_body`."""
    resend_if_stale: bool = False
    """Whether to send the leg again if the engine had already closed the idle connection."""
    wants_whole_body: bool = False
    """Whether the driver reads the complete answer before the next step, instead of returning its stream; see Legs."""
    preconnect_to: Backend | None = None
    """Backend to which the driver connects while this leg runs; None: to none. The next leg probably goes there."""


class LegPair:
    """A prefill leg and a decode leg that run at the same time. If one leg fails, both end.

    Enter it with `with` for as long as the decode leg is needed, and yield it first; see Legs. Leaving the block before
    the prefill leg has ended cancels that leg. If the block is left with an UpstreamError after the prefill leg failed,
    the prefill leg's error is raised instead, because a missing KV cache explains whatever the decoder reports.
    """

    def __init__(
        self,
        prefill: EngineLeg,
        decode: EngineLeg,
        read: Callable[[Response, bytes], None],
        is_served: Callable[[], bool] | None = None,
    ) -> None:
        self._legs: tuple[EngineLeg, EngineLeg] | None = prefill, decode
        self.is_served = is_served
        """Returns whether the decoder no longer needs the prefiller, so that a failure of the prefill leg has no
        effect. None: it needs the prefiller until the prefill leg has ended."""
        self.error: Exception | None = None
        """The error of the prefill leg, which the driver sets: an UpstreamError unless the program has a defect."""
        self.stop_prefill: Callable[[], object] | None = None
        """Cancels the prefill leg; None if it is not under way. The driver sets it."""
        self.wait_for_prefill_end: Callable[[], Awaitable[None]] | None = None
        """Waits for the end of the prefill leg and raises its UpstreamError; None if the driver cannot wait."""
        self.read_prefill_answer = read
        """Reads the prefiller's answer, which has a head and a body. Raises UpstreamError if the prefill failed."""

    def take_legs(self) -> tuple[EngineLeg, EngineLeg]:
        """Return the prefill leg and the decode leg, and forget them to free their bodies. Can be called only once."""
        legs, self._legs = self._legs, None
        assert legs is not None
        return legs

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.stop_prefill is not None:
            self.stop_prefill()
        if self.error is not None and error is not self.error and isinstance(error, UpstreamError):
            raise self.error from error


if TYPE_CHECKING:
    Legs = Generator[EngineLeg | LegPair | Response | Attempt, Any, None]
    """Generator of the steps of one attempt. The driver performs each step and sends its result, or throws an
    UpstreamError in:

    - Leg: the driver sends it. The result is its Response once the headers have arrived; with `wants_whole_body`, the
      answer and its body once its connection was given back.
    - Pair: the driver sends both legs. The result is the Response of the decode leg once its headers have arrived. The
      prefill leg's whole answer goes to `LegPair.read_prefill_answer`. If the prefill leg fails, the decode leg fails,
      too.
    - Response: the driver reads it. The result is its whole body, as bytes.
    - Attempt: the last step. The driver resumes the generator when the answer was taken, or throws in the error with
      which the answer ended. The generator gives back every lease and connection, and ends.

    Closing the generator early, or throwing any other error in, gives everything back, too.
    """


def finish_legs(legs: Legs) -> None:
    """End an attempt whose answer was received completely."""
    if next(legs, None) is not None:  # so no exception is made and caught
        raise RuntimeError("an attempt continued after its answer")


def fail_legs(legs: Legs, error: BaseException) -> None:
    """End an attempt with the error of its answer or of the current step. Raises the error."""
    try:
        legs.throw(error)
    except StopIteration:
        raise error from None
    raise RuntimeError("an attempt continued after its failure")


@dataclass(slots=True)
class ClaimedRanks:
    """The ranks of one backend that legs of this worker use."""

    leg_counts: list[int] = field(default_factory=list)
    """The number of legs under way, by rank."""
    next_rank: int = 0
    """The rank that is used next if several ranks have equally few legs."""


class RankCounts:
    """Counts one worker's legs on the data-parallel ranks (that is, the engines) behind each address.

    A vLLM server with several engines chooses an engine itself unless a request names a rank. A claim takes the rank
    with the fewest legs of this worker, and takes turns between equal ranks.
    """

    def __init__(self) -> None:
        self._backends: dict[int, ClaimedRanks] = {}  # by slot; there are as many slots as there can be backends

    def start_claim(self) -> RankClaim:
        """Return a claim for one leg, a context manager that gives its rank back at the end."""
        return RankClaim(self)

    def take_rank(self, backend: Backend, count: int) -> tuple[list[int], int]:
        """Claim the best rank of a backend with `count` ranks. Return the legs under way by rank, and the rank."""
        claimed = self._backends.setdefault(backend.slot, ClaimedRanks())
        legs = claimed.leg_counts
        legs.extend([0] * (count - len(legs)))
        fewest = min(legs[:count])
        turn = claimed.next_rank % count
        rank = legs.index(fewest, turn) if fewest in legs[turn:count] else legs.index(fewest)
        claimed.next_rank = rank + 1
        legs[rank] += 1
        return legs, rank


class RankClaim:
    """The claim of one leg on one rank of its backend."""

    def __init__(self, ranks: RankCounts) -> None:
        self._ranks = ranks
        self._legs: list[int] | None = None
        self._rank = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._legs is not None:
            self.release_ranks()

    def claim_rank(self, backend: Backend, count: int) -> int:
        """Claim a rank of this backend, which has `count` ranks, and return it. Any previous rank is given back."""
        self.release_ranks()
        self._legs, self._rank = self._ranks.take_rank(backend, count)
        return self._rank

    def rank_header(self, backend: Backend, count: int) -> dict[str, str]:
        """Return the header that selects a rank of this backend; empty if the backend has only one rank."""
        return {RANK_HEADER: str(self.claim_rank(backend, count))} if count > 1 else {}

    def release_ranks(self) -> None:
        """Give the rank back before the end of the block. May be called again."""
        if self._legs is not None:
            self._legs[self._rank] -= 1
            self._legs = None
