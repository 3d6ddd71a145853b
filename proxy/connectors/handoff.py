"""The hand-over of one attempt's KV cache from its prefiller to its decoder, and all that follows from how it ends.

The protocol tells it when the prefiller has the KV cache for the decoder; the reader of the answer tells it of the
decoder's first output. What follows is the same for all protocols: the prefiller's lease no longer counts the KV, the
pair of engines is credited or blamed, the hand-over is counted, and KV that stays behind is given to the releaser.
"""

from __future__ import annotations

import logging
from enum import Enum
from typing import TYPE_CHECKING, Final, Self

from proxy.balancer.fitness.handovers import LEAST_TOKENS
from proxy.balancer.lease import Lease
from proxy.common.errors import Failure, UpstreamError
from proxy.observe import logs

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from proxy.balancer.pick import PickRequest
    from proxy.connectors.base import ConnectorContext
    from proxy.connectors.releaser import PrefilledKv
    from proxy.dialects.call import Call
    from proxy.observe.timeline import Timeline

logger = logging.getLogger(__name__)


class KvSource(Enum):
    """The source of the decoder's KV cache."""

    PREFILLER = "prefiller"
    """From that very prefiller, so a failure may be about the pair of them."""
    STORE = "store"
    """From what all engines share, so it matters little who put it there."""
    DECODER = "decoder"
    """The decoder computes the prompt itself."""


class KvState(Enum):
    """The state of the KV cache."""

    COMPUTING = "computing"
    HELD = "held"
    """It is there for the decoder to have, completely or, in some protocols, as far as it is computed."""
    ARRIVED = "arrived"
    """The decoder works with it, or at least works."""
    LOST = "lost"
    """The decoder has given up before its first output."""


# To read a member off its class takes as long as four calls.
PREFILLER: Final = KvSource.PREFILLER
DECODER: Final = KvSource.DECODER
_COMPUTING: Final = KvState.COMPUTING
_HELD: Final = KvState.HELD
_ARRIVED: Final = KvState.ARRIVED
_SETTLED: Final = (KvState.ARRIVED, KvState.LOST)


class LocalKv:
    """No hand-over: the engine that answers has computed the KV cache by itself."""

    __slots__ = ("_lease",)

    def __init__(self, lease: Lease) -> None:
        self._lease = lease

    def arrived(self) -> None:
        """The engine has sent its first output. May be called again."""
        self._lease.confirm()

    def lost(self) -> None:
        """The engine gave up before its first output."""


class KvHandoff:
    """`with` it around both legs: entering leases a decoder and a prefiller, and begins an attempt with them.

    Left in state HELD, the transfer has failed or is not wanted any more. That counts against the pair if it may be
    their fault, and what the prefiller keeps is an orphan.
    """

    __slots__ = (
        *("prefiller", "decoder", "source", "kv", "failed", "state", "on_arrived"),
        *("_context", "_call", "_request", "_timeline", "_least_tokens", "_kept"),
    )

    def __init__(
        self,
        context: ConnectorContext,
        call: Call,
        request: PickRequest,
        timeline: Timeline,
        least_tokens: int = LEAST_TOKENS,
    ) -> None:
        """From the hand-over of a prompt of less than `least_tokens` nothing follows for whether the decoder fetches
        KV.
        """
        self.prefiller: Lease
        self.decoder: Lease
        self.source: KvSource = PREFILLER
        self.kv: PrefilledKv | None = None
        """What the prefiller keeps until the decoder has fetched it. None: nothing that would have to be freed."""
        self.failed = set(request.avoid)
        """Backends that are not to be asked for help."""
        self.state: KvState = _COMPUTING
        self.on_arrived: Callable[[], None] | None = None
        """What else follows for the protocol."""
        self._context = context
        self._call = call
        self._request = request
        self._timeline = timeline
        self._least_tokens = least_tokens
        self._kept: PrefilledKv | None = None

    @property
    def is_settled(self) -> bool:
        """The decoder has said something: that it has the KV, or that it gave up."""
        return self.state in _SETTLED

    def prefilled(self, tokens: int | None, cached: int | None) -> None:
        """The prefiller has done its work, and this is what its answer tells of the prompt; see told_of_prompt."""
        self.prefiller.tell(tokens, cached)
        self.prefiller.free_compute()

    def held(self, kv: PrefilledKv | None = None) -> None:
        """The prefiller has it for the decoder: from now on a failure may be one to fetch it.

        `kv`: what it keeps, if that was not known before.
        """
        if kv is None:
            kv = self.kv
        self.kv = self._kept = kv
        if kv is not None:
            self._context.releaser.last_transfer = kv.transfer
        if self.state is _COMPUTING:
            self.state = _HELD

    def arrived(self) -> None:
        """The decoder has sent its first output. May be called again."""
        if self.state in _SETTLED:
            return
        self.state = _ARRIVED
        prefiller, decoder = self.prefiller.backend, self.decoder.backend
        self.prefiller.free_kv()
        source = self.source
        if source is DECODER:
            self._timeline.kv = "local"
        else:
            if source is PREFILLER:
                self._context.pools.quarantine.succeeded(prefiller, decoder)
            tokens = self._timeline.usage.prompt_tokens or self._call.prompt_tokens
            verdict = self._context.fitness.handed_over(prefiller, decoder, tokens, self._least_tokens)
            self._timeline.kv = verdict
            if self.kv is not None:
                self._context.releaser.fetched(self.kv, decoder, verdict, self.failed)
                self.kv = self._kept = None
        self.decoder.confirm()
        if self.on_arrived is not None:
            self.on_arrived()

    def lost(self) -> None:
        """The decoder gave up before its first output. May be called again."""
        if self.is_settled:
            return
        self.state = KvState.LOST
        self.prefiller.free_kv()
        self._hold_against_pair()
        if self.kv is not None and not self.kv.outlives_giving_up:
            self.kv = self._kept = None

    def __enter__(self) -> Self:
        """Raises NoBackendAvailable."""
        pools, request = self._context.pools, self._request
        self.decoder = decoder = Lease(pools.decode, request)
        decoder.__enter__()
        try:
            self.prefiller = pools.prefiller_for(decoder.backend, request)
            self.prefiller.__enter__()
        except BaseException as error:
            decoder.__exit__(type(error), error, error.__traceback__)
            raise
        timeline = self._timeline
        timeline.begin_attempt()
        timeline.decode_pick, timeline.prefill_pick = decoder.pick, self.prefiller.pick
        timeline.prediction = self.prefiller.prediction
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        usage = self._timeline.usage
        if error is None and not usage.is_resumed:
            self.decoder.answer_tokens = usage.completion_tokens
        try:
            if self._kept is not None or error is not None:
                self._fetched_by_nobody(error)
        finally:
            try:
                self.prefiller.__exit__(kind, error, trace)
            finally:
                self.decoder.__exit__(kind, error, trace)

    def _fetched_by_nobody(self, error: BaseException | None) -> None:
        """The attempt has ended with an error, or before the decoder has the KV cache."""
        if isinstance(error, UpstreamError):
            if error.failure is Failure.BOOTSTRAP:  # what was looked for elsewhere has been kept no longer than that
                return
            self.failed.add(error.backend)
            # A connection that was refused has asked for no KV.
            if self.state is _HELD and error.is_backends_fault and error.failure is not Failure.CONNECT:
                self._hold_against_pair()
        if self._kept is not None:
            self._context.releaser.orphaned(self._kept, self.failed)

    def _hold_against_pair(self) -> None:
        """The hand-over has failed, and it is not known which of the two is at fault."""
        if self.source is not PREFILLER:
            return
        prefiller, decoder = self.prefiller.backend, self.decoder.backend
        if self._context.pools.quarantine.failed(prefiller, decoder):
            self._context.metrics.pair_quarantines_total.inc()
            logger.warning(
                "prefill instance %s and decode instance %s are kept apart: hand-overs between them fail",
                prefiller.name,
                decoder.name,
                extra=logs.ALWAYS,
            )
