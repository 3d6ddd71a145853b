"""Prefill, then decode: the legs of the protocols in which the decoder is called when the prefiller has answered.

KV parameters in the prefiller's answer go to the decoder verbatim: opaque, and used once. The decoder is reserved
before the prefiller is called, so that KV cache is never pinned while no decoder has room for it. A prompt that a
decoder alone would have sooner goes there, where the settings say so.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, TypeVar

import orjson

from proxy.backend import Role
from proxy.balancer.fitness.handovers import LEAST_TOKENS
from proxy.balancer.local_prefill import LocalPrefill
from proxy.balancer.policies.asked import ask
from proxy.connectors.attempt import Attempt
from proxy.connectors.base import first_byte_seconds, new_attempt_id, parse_prefilled, prefill_seconds, refusal
from proxy.connectors.disaggregated import Disaggregated
from proxy.connectors.handoff import KvHandoff, KvSource
from proxy.connectors.kv_transfer import PrefilledKv, kv_transfer
from proxy.connectors.legs import Leg, opened
from proxy.connectors.one_engine import RARE
from proxy.connectors.prefill_body import prefill_body
from proxy.errors import Failure, NoBackendAvailable, UpstreamError
from proxy.terms import Stage

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping
    from contextlib import AbstractAsyncContextManager
    from typing import Any

    from proxy.answers import EngineAnswer
    from proxy.backend import Backend
    from proxy.balancer.lease import Lease
    from proxy.balancer.pick import PickRequest
    from proxy.call import Call
    from proxy.connectors.base import ConnectorContext
    from proxy.connectors.legs import Legs
    from proxy.connectors.ranks import RankClaim
    from proxy.observe.timeline import Timeline
    from proxy.upstream import Response
    from proxy.wire.document import Document

    Result = TypeVar("Result")
    Steps = Generator[Leg | Response | Attempt, Any, Result]
    """A part of an attempt's legs, and what comes of it."""

# Only do_remote_decode is read by the engines; the rest is what every proxy for these protocols sends.
_ASK_FOR_KV: Final = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


class Sequential(Disaggregated):
    """Prefill → decode, one after the other. A protocol says what it makes of the prefiller's answer."""

    least_tokens = LEAST_TOKENS
    """A hand-over of a shorter prompt does not show whether the decoder fetches KV."""
    source_without_kv: KvSource
    """Where a decoder gets the KV from when the prefiller's answer names none for it to fetch."""

    def __init__(self, context: ConnectorContext) -> None:
        super().__init__(context)
        self._pools = context.pools
        seat = None if context.new_seat is None else context.new_seat()
        self._local_prefill = LocalPrefill(context.pools.prefill, context.pools.decode, seat)
        self._metrics = context.metrics
        self._releaser = context.releaser

    def goes_leg_by_leg(self, call: Call) -> bool:
        """All do, but rare ones are not for every protocol."""
        return RARE.isdisjoint(call.values)

    def open_both(self, call: Call, request: PickRequest, timeline: Timeline) -> AbstractAsyncContextManager[Attempt]:
        """See Disaggregated."""
        return opened(self.legs_of_both(call, request, timeline), self._upstream)

    def legs_of_both(self, call: Call, request: PickRequest, timeline: Timeline) -> Legs:
        """Both legs, but a decoder alone for a short prompt, and for one that it has sooner. See Disaggregated."""
        kv = self._context.settings.kv
        if call.prompt_tokens < kv.prefill_min_tokens:
            self._metrics.prefills_skipped_total.inc()
            return self._one_engine.decoder.legs(call, request, timeline)
        if kv.skip_prefill:
            return self._where_sooner(call, request, timeline)
        return self._both(call, request, timeline)

    def _where_sooner(self, call: Call, request: PickRequest, timeline: Timeline) -> Legs:
        """Both legs, or a decoder alone; what comes of it is learned."""
        local, usage = self._local_prefill, timeline.usage
        if usage.is_resumed:
            yield from self._both(call, request, timeline)
            return
        asked = ask(request)
        decoder = local.sooner(asked, self._context.settings.kv.local_max_tokens)
        if decoder is None:
            yield from self._both(call, request, timeline)
            seconds = timeline.seconds
            first_token = seconds.get(Stage.FIRST_TOKEN)
            if timeline.kv != "local" and not usage.is_resumed:
                took = None if first_token is None else seconds.get(Stage.HANDOFF, 0.0) + first_token
                local.handed_over(timeline.decoder, asked, took, usage.completion_tokens or 0)
            return
        self._metrics.prefills_skipped_total.inc()
        chosen = replace(request, prefer=decoder)
        yield from self._one_engine.decoder.legs(call, chosen, timeline)
        tokens, cached = usage.prompt_tokens, usage.cached_tokens
        told = None if tokens is None or cached is None else (tokens, cached)
        took = timeline.seconds.get(Stage.FIRST_TOKEN)
        local.served(timeline.decoder, asked, took, usage.completion_tokens or 0, told)

    def _both(self, call: Call, request: PickRequest, timeline: Timeline) -> Legs:
        with KvHandoff(self._context, call, request, timeline, self.least_tokens) as handoff:
            params = yield from self._prefill(call, handoff, timeline)
            rank = self._ranks.claim() if self._context.settings.balance.decode_dp_ranks > 1 else None
            try:
                with (yield from self._decode(call, params, handoff, rank, timeline)) as response:
                    if not response.is_success:
                        raise refusal(response, (yield response))
                    if call.stream:
                        timeline.enter(Stage.FIRST_TOKEN)
                    yield Attempt(
                        response,
                        timeline,
                        prefiller=handoff.prefiller.backend,
                        kv_handed_over=handoff.source is not KvSource.DECODER,
                        handoff=handoff,
                    )
            finally:
                if rank is not None:
                    rank.free()

    # What a protocol says

    @abstractmethod
    def prefill_failed(self, call: Call, error: UpstreamError) -> None:
        """A prefiller has not prefilled, or its answer was lost."""

    @abstractmethod
    def takes(self, call: Call, handoff: KvHandoff, answer: EngineAnswer, *, has_kv: bool, asks_again: bool) -> bool:
        """Whether the decoder is asked after this prefill, or else a prefiller once more, which `asks_again` says may
        be done. `has_kv`: the answer names something to fetch. Raises UpstreamError.
        """

    # How

    def _prefill(self, call: Call, handoff: KvHandoff, timeline: Timeline) -> Steps[bytes | None]:
        """Run the prefill leg: KV parameters for the decoder, verbatim; None: there are none. Raises UpstreamError."""
        settings = self._context.settings
        timeline.enter(Stage.PREFILL)
        asks_again = True
        while True:
            prefiller = handoff.prefiller.backend
            attempt_id = new_attempt_id()
            timeline.prefiller, timeline.prefill_id = prefiller.name, attempt_id
            headers = {**call.headers, "x-request-id": attempt_id}
            rank, ranks = None, settings.balance.prefill_dp_ranks
            if ranks > 1:
                rank = self._ranks.claim()
                headers |= rank.header(prefiller, ranks)
            asked = prefill_body(call, self._pools.prefill, prefiller, _ASK_FOR_KV)
            seconds = prefill_seconds(settings.timeouts, call)
            try:
                answer, body = yield Leg(prefiller, call.api.path, asked, headers, seconds, is_whole=True)
                told = parse_prefilled(answer, body)
            except UpstreamError as error:
                self.prefill_failed(call, error)
                raise
            finally:
                if rank is not None:
                    rank.free()
            of_prompt = timeline.usage.saw_prompt(told.values.get("usage"))
            params, kv = _kept_kv(told, call, prefiller)
            if self.takes(call, handoff, answer, has_kv=kv is not None, asks_again=asks_again):
                break
            asks_again = False
            timeline.left_prefiller(handoff.prefiller.pick)
        if kv is None:
            handoff.source = self.source_without_kv
        handoff.prefilled(*of_prompt)
        handoff.held(kv)
        return None if handoff.source is KvSource.DECODER else params

    def _decode(
        self,
        call: Call,
        kv_params: bytes | None,
        handoff: KvHandoff,
        rank: RankClaim | None,
        timeline: Timeline,
    ) -> Steps[Response]:
        """Open the decode leg. A refused connection has used nothing, so the same KV goes to another decoder."""
        params = kv_params if not call.kv_params else _decode_params(kv_params, call.kv_params)
        changes = {} if params is None else {"kv_transfer_params": orjson.Fragment(params)}
        body = call.body(changes)
        # An answer that is not streamed comes in one piece at the end: its hand-over cannot be told from its decoding.
        timeline.enter(Stage.HANDOFF if call.stream else Stage.STREAM)
        while True:
            decoder = handoff.decoder.backend
            timeline.decoder, timeline.decode_id = decoder.name, timeline.prefill_id
            headers = {**call.headers, "x-request-id": timeline.prefill_id}
            if rank is not None:
                # Any rank can fetch what any rank of the prefiller keeps: the parameters tell which one that is.
                headers |= rank.header(decoder, self._context.settings.balance.decode_dp_ranks)
            seconds = self._handoff_seconds(handoff.kv, call)
            try:
                response: Response = yield Leg(decoder, call.api.path, body, headers, seconds)
                return response
            except UpstreamError as error:
                if error.failure is Failure.CONNECT and self.move(handoff.decoder, handoff.failed, error):
                    timeline.left_decoder(handoff.decoder.pick)
                    self._metrics.retries_total.labels(Role.DECODE.value, error.failure.value).inc()
                    continue
                if error.failure is Failure.CONNECT:
                    # No decoder is left: another prefill would only pin more KV cache that none pulls.
                    raise NoBackendAvailable(Role.DECODE) from error
                raise

    def _handoff_seconds(self, kv: PrefilledKv | None, call: Call) -> float:
        """How long a decoder may take to answer at all. One that came back later might fetch blocks that the prefiller
        has given to others meanwhile. An answer that is not streamed says nothing before its end.
        """
        timeouts = self._context.settings.timeouts
        if not call.stream:
            return first_byte_seconds(timeouts, call)
        if kv is None:
            return timeouts.handoff_seconds
        lease_seconds = self._releaser.pin_seconds(kv.prefiller, kv.transfer)
        return min(timeouts.handoff_seconds, lease_seconds / 2)

    @staticmethod
    def move(lease: Lease, failed: set[Backend], error: UpstreamError) -> bool:
        """Move a lease to a backend that has not failed this attempt; False when there is none."""
        failed.add(error.backend)
        try:
            lease.move(failed, because=error)
        except NoBackendAvailable:
            return False
        return True


def _kept_kv(answer: Document, call: Call, prefiller: Backend) -> tuple[bytes | None, PrefilledKv | None]:
    """A prefiller's `kv_transfer_params` as it wrote them, None when there are none that say anything; and the KV that
    they name for a decoder to fetch, None when they name none.
    """
    told = answer.values.get("kv_transfer_params")
    if not isinstance(told, dict) or not told:
        return None, None
    params = answer.raw_value("kv_transfer_params")
    if params is None or told.get("do_remote_prefill") is not True:
        return params, None
    return params, PrefilledKv(prefiller, params, kv_transfer(told), call.prompt_tokens, call.headers)


def _decode_params(params: bytes | None, extra: Mapping[str, object]) -> bytes | None:
    """`kv_transfer_params` of the decode leg: the prefiller's very bytes, and the call's own members behind them."""
    if not extra:
        return params
    members = orjson.dumps(dict(extra))
    return members if params is None else params[:-1] + b"," + members[1:]
