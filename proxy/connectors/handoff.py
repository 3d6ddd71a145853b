"""Tracks the handoff of one attempt's KV cache from prefiller to decoder, and acts on its outcome.

The protocol reports when the prefiller has the KV cache for the decoder. The reader of the answer reports the decoder's
first output. All protocols act in the same way: the prefiller's lease no longer counts the KV, the handoff counts for
or against the pair of engines, and the releaser gets KV that stays behind.
"""

from __future__ import annotations

import logging
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Self

from proxy.balancer.handoff_verdicts import MIN_TOKENS, HandoffVerdict
from proxy.common.errors import Failure, UpstreamError
from proxy.common.terms import Stage
from proxy.observe import logs

if TYPE_CHECKING:
    from array import array
    from collections.abc import Callable
    from types import TracebackType

    from proxy.balancer.lease import Lease
    from proxy.balancer.pick import GapCounter, PickRequest
    from proxy.common.backend import Backend
    from proxy.connectors.base import ConnectorContext
    from proxy.connectors.read_back import KeptAnswers
    from proxy.connectors.releaser import PrefilledKv
    from proxy.dialects.call import Call
    from proxy.observe.timeline import Timeline

logger = logging.getLogger(__name__)


class KvSource(Enum):
    """The engine or store from which a decoder gets its KV cache."""

    PREFILLER = "prefiller"
    """The prefiller of the attempt. A failure may be a problem between this prefiller and this decoder."""
    STORE = "store"
    """A store that all engines share. A failure says little about the prefiller."""
    DECODER = "decoder"
    """No other engine: the decoder computes the prompt itself."""


class KvState(Enum):
    """The state of the KV cache in a handoff."""

    BEING_COMPUTED = "computing"
    HELD_BY_PREFILLER = "held"
    """The decoder can fetch the KV cache. In some protocols, only a part of it is computed yet."""
    ARRIVED_AT_DECODER = "arrived"
    """The decoder has sent output. It may have computed the KV cache itself."""
    LOST = "lost"
    """The decoder gave up before its first output."""


# Reading a member off its class takes as long as four calls.
PREFILLER_SOURCE: Final = KvSource.PREFILLER
DECODER_SOURCE: Final = KvSource.DECODER
_PREFILL_STAGE: Final = Stage.PREFILL
_BEING_COMPUTED: Final = KvState.BEING_COMPUTED
_HELD_BY_PREFILLER: Final = KvState.HELD_BY_PREFILLER
_ARRIVED_AT_DECODER: Final = KvState.ARRIVED_AT_DECODER
# Share of the predicted prefill that is not counted as handoff where the end of the prefill is only predicted. The
# prediction includes the mean time of transfers, because it is learned from the same answers.
_CERTAIN_PREFILL_SHARE: Final = 0.75
_SETTLED_STATES: Final = (KvState.ARRIVED_AT_DECODER, KvState.LOST)


class LocalKvListener:
    """Takes the place of a handoff if the engine that answers has computed the KV cache itself."""

    def __init__(self, lease: Lease) -> None:
        self._lease = lease

    def record_kv_arrival(self, gap_counter: GapCounter | None = None) -> None:
        """Record the engine's first output. May be called again."""
        self._lease.confirm_beginning(gap_counter)

    def keep_answer_kv(self, params: Any, ids: array[int] | None) -> None:
        """Do nothing. Called when the engine keeps the KV cache of its answer, which no protocol with one leg reads."""

    def record_kv_loss(self) -> None:
        """Do nothing. Called when the engine gave up before its first output; there is no KV cache to release."""


class KvHandoff:
    """Context manager around both legs of an attempt. Entering leases a decoder and a prefiller and begins the attempt.

    If it is left in state HELD, the transfer failed or is no longer wanted. This counts against the pair if the pair
    may have caused it, and the KV that the prefiller keeps is orphaned.
    """

    def __init__(
        self,
        context: ConnectorContext,
        call: Call,
        request: PickRequest,
        timeline: Timeline,
        least_tokens: int = MIN_TOKENS,
    ) -> None:
        """Create the handoff of one attempt's KV cache.

        `least_tokens`: the handoff of a shorter prompt does not show whether the decoder fetches KV.
        """
        self.prefiller: Lease
        self.decoder: Lease
        self.source: KvSource = PREFILLER_SOURCE
        self.prefilled_kv: PrefilledKv | None = None
        """The KV that the prefiller keeps until the decoder has fetched it; None if no KV has to be freed."""
        self.failed_error = set(request.avoided_backends)
        """Backends that have failed in this attempt. The releaser uses one of them only if there is no other."""
        self.state: KvState = _BEING_COMPUTED
        self.on_arrived: Callable[[], None] | None = None
        """Called at the decoder's first output; None if the protocol does not need it."""
        self.kept_answers: KeptAnswers | None = None
        """The record of KV caches that decoders keep after an answer; None if the protocol has none."""
        self.answers_after_transfer = False
        """Whether the prefiller answers only after it has sent the KV.

        The end of the prefill is then only predicted.
        """
        self._context = context
        self._call = call
        self._request = request
        self._timeline = timeline
        self._least_tokens = least_tokens
        self._kept_params: PrefilledKv | None = None
        self._computed_at = 0.0  # time of the prefiller's answer; 0.0: it has not arrived

    @property
    def is_settled(self) -> bool:
        """Whether the decoder has either sent its first output or given up."""
        return self.state in _SETTLED_STATES

    def record_prefill(self, tokens: int | None, cached: int | None) -> None:
        """Record the end of the prefill. The prefiller's answer reports the prompt's tokens and its cached tokens."""
        self._computed_at = self._timeline.clock()
        if self.answers_after_transfer and (sent := self._prefill_sent_at()) is not None:
            pair = self.prefiller.backend, self.decoder.backend
            self._context.pools.handoff_times.record_prefill_answer(*pair, sent, self._computed_at)
        compatibility = self._context.compatibility
        # Engines that report cached tokens cost no call.
        if cached is None or compatibility.missing_cache_reports:
            prediction = self._timeline.prediction
            if prediction is not None and tokens is not None:
                compatibility.record_cache_report(self.prefiller.backend, prediction.cached_tokens, cached)
        self.prefiller.record_usage(tokens, cached)
        self.prefiller.release_compute()

    def record_kv_held(self, kv: PrefilledKv | None = None) -> None:
        """Record that the prefiller has the KV cache for the decoder. A later failure may be a failure to fetch it.

        `kv`: the KV that the prefiller keeps; None: use the value that was set before.
        """
        if kv is None:
            kv = self.prefilled_kv
        self.prefilled_kv = self._kept_params = kv
        if kv is not None:
            self._context.releaser.last_transfer = kv.transfer
        if self.state is _BEING_COMPUTED:
            self.state = _HELD_BY_PREFILLER

    def record_kv_arrival(self, gap_counter: GapCounter | None = None) -> None:
        """Record the decoder's first output: the KV cache has arrived. May be called again."""
        if self.state in _SETTLED_STATES:
            return
        self.state = _ARRIVED_AT_DECODER
        prefiller, decoder = self.prefiller.backend, self.decoder.backend
        self.prefiller.release_kv()
        source = self.source
        if source is DECODER_SOURCE:
            self._timeline.kv = "local"
        else:
            if source is PREFILLER_SOURCE:
                self._context.pools.pair_quarantine.record_successful_handoff(prefiller, decoder)
                if self._call.stream and not self.failed_error:  # otherwise the first output is not the first token
                    self._record_handoff_time(prefiller, decoder)
            tokens = self._timeline.usage.prompt_tokens or self._call.prompt_tokens
            verdict = self._context.compatibility.record_handoff(prefiller, decoder, tokens, self._least_tokens)
            self._timeline.kv = verdict
            if verdict is HandoffVerdict.UNKNOWN:
                self._timeline.kv_verdict = partial(
                    self._context.compatibility.incompatibilities.handoff_verdict, decoder, prefiller
                )
            if self.prefilled_kv is not None:
                self._context.releaser.record_fetch(self.prefilled_kv, decoder, verdict, self.failed_error)
                self.prefilled_kv = self._kept_params = None
        self.decoder.confirm_beginning(gap_counter)
        if self.on_arrived is not None:
            self.on_arrived()

    def _record_handoff_time(self, prefiller: Backend, decoder: Backend) -> None:
        """Record the seconds since the end of the prefill as the time of this pair's handoff."""
        timeline = self._timeline
        now, began = timeline.clock(), self._computed_at
        if self.answers_after_transfer:
            prediction, sent = timeline.prediction, self._prefill_sent_at()
            if prediction is None or sent is None:
                return
            # A prediction may be too short for a queue, but not too long for the prompts ahead that were answered.
            ahead = self._context.pools.handoff_times.last_answer_ahead(prefiller, decoder, sent)
            began = min(max(sent + _CERTAIN_PREFILL_SHARE * prediction.predicted_seconds, ahead), now)
        if began:
            tokens = timeline.usage.prompt_tokens or self._call.prompt_tokens
            self._context.pools.handoff_times.record_handoff(prefiller, decoder, tokens, began, now)

    def _prefill_sent_at(self) -> float | None:
        """Return the time at which the prefiller got the prompt, or None if it did not."""
        stages = self._timeline.entered_stages
        return self._timeline.stage_times[stages.index(_PREFILL_STAGE)] if _PREFILL_STAGE in stages else None

    def keep_answer_kv(self, params: Any, ids: array[int] | None) -> None:
        """Record that the decoder keeps the KV cache of its answer for the conversation's next turn."""
        if self.kept_answers is not None:
            self.kept_answers.keep(self._call, self.decoder.backend, params, ids)

    def record_kv_loss(self) -> None:
        """Record that the decoder gave up before its first output. May be called again."""
        if self.is_settled:
            return
        self.state = KvState.LOST
        self.prefiller.release_kv()
        self._blame_pair()
        if self.prefilled_kv is not None and not self.prefilled_kv.survives_rejected_decode:
            self.prefilled_kv = self._kept_params = None

    def __enter__(self) -> Self:
        """Choose and lease a prefiller and a decoder. Raises NoBackendAvailable."""
        prefiller, decoder = self.prefiller, self.decoder = self._context.pools.enter_both_leases(self._request)
        timeline = self._timeline
        timeline.begin_attempt()
        timeline.decode_pick, timeline.prefill_pick = decoder.backend_pick, prefiller.backend_pick
        timeline.prediction = prefiller.policy_prediction
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        usage = self._timeline.usage
        if error is None and not usage.is_resumed:
            self.decoder.answer_tokens = usage.completion_tokens
        try:
            if self._kept_params is not None or error is not None:
                self._settle_unfetched(error)
        finally:
            try:
                self.prefiller.__exit__(kind, error, trace)
            finally:
                self.decoder.__exit__(kind, error, trace)

    def _settle_unfetched(self, error: BaseException | None) -> None:
        """Handle an attempt that ended with an error, or before the decoder had the KV cache."""
        if isinstance(error, UpstreamError):
            if error.failure is Failure.BOOTSTRAP:  # the decoder asked another prefiller, so nothing is kept here
                return
            self.failed_error.add(error.backend)
            # A decoder that refused the connection has not tried to fetch KV.
            if self.state is _HELD_BY_PREFILLER and error.is_fault_of_backend and error.failure is not Failure.CONNECT:
                self._blame_pair()
        if self._kept_params is not None:
            self._context.releaser.add_orphan(self._kept_params, self.failed_error)

    def _blame_pair(self) -> None:
        """Count a failed handoff against the prefiller and the decoder as a pair, because either may have caused it."""
        if self.source is not PREFILLER_SOURCE:
            return
        prefiller, decoder = self.prefiller.backend, self.decoder.backend
        if self._context.pools.pair_quarantine.record_failed_handoff(prefiller, decoder):
            self._context.metrics.pair_quarantines_total.inc()
            logger.warning(
                "prefill instance %s and decode instance %s are kept apart: handoffs between them fail",
                prefiller.name,
                decoder.name,
                extra=logs.ALWAYS,
            )
