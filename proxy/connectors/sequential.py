"""Protocols that send one leg after the other: the decode leg follows the prefiller's answer.

KV parameters in the prefiller's answer go to the decoder verbatim, and are used once. The decoder is reserved before
the prefiller is called, so that KV cache is never pinned while no decoder has room for it. With `kv.skip_prefill` a
prompt goes to a decoder alone if that decoder would finish it sooner.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar, Final

import msgspec
import orjson

from proxy.balancer.handoff_verdicts import MIN_STORED_TOKENS, MIN_TOKENS
from proxy.balancer.incompatibilities import IncompatibilityKind
from proxy.balancer.local_prefill import FirstToken, LocalPrefill
from proxy.balancer.policies.prefill_cost import make_prompt_costs
from proxy.common.backend import Backend, Role
from proxy.common.errors import Failure, NoBackendAvailable, UpstreamError
from proxy.common.terms import Stage
from proxy.connectors.base import (
    ConnectorContext,
    PrefillAnswerBody,
    first_byte_timeout_seconds,
    make_refusal,
    new_attempt_id,
    parse_prefilled,
    prefill_timeout_seconds,
)
from proxy.connectors.disaggregated import DisaggregatedConnector, PrefillBodyMaker, make_prefill_body
from proxy.connectors.handoff import DECODER_SOURCE, KvHandoff, KvSource
from proxy.connectors.legs import Attempt, EngineLeg
from proxy.connectors.read_back import KeptAnswer, KeptAnswers
from proxy.connectors.releaser import KvTransfer, PrefilledKv, parse_kv_params

if TYPE_CHECKING:
    from proxy.balancer.lease import Lease
    from proxy.balancer.pick import PickRequest
    from proxy.connectors.legs import Legs, RankClaim
    from proxy.dialects.base import EngineAnswer
    from proxy.dialects.call import Call
    from proxy.observe.timeline import Timeline
    from proxy.upstream import Response
    from proxy.wire.document import Body


# Reading a member off its class takes as long as four calls.
_PREFILL_STAGE: Final = Stage.PREFILL
_HANDOFF_STAGE: Final = Stage.HANDOFF
_FIRST_TOKEN_STAGE: Final = Stage.FIRST_TOKEN
_STREAM_STAGE: Final = Stage.STREAM

_PUSH_HINT: Final = (
    "runs NixlPushConnector, which connector vllm_pull serves slowly, because decoders register after the prefill: "
    "set `connector: nixl_push`"
)

# Only do_remote_decode is read by the engines; the rest is what every proxy for these protocols sends.
_PREFILL_BODY_MAKER: Final = PrefillBodyMaker(
    {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "remote_engine_id": None,
        "remote_block_ids": None,
        "remote_host": None,
        "remote_port": None,
    }
)


class SequentialConnector(DisaggregatedConnector):
    """The base of protocols that send the prefill leg, then the decode leg."""

    least_tokens: ClassVar[int] = MIN_TOKENS
    """Minimum length in tokens of a prompt whose handoff shows whether the decoder fetches KV."""
    source_without_kv: ClassVar[KvSource]
    """The source of the decoder's KV cache if the prefiller's answer has no KV parameters."""

    def __init__(self, context: ConnectorContext) -> None:
        super().__init__(context)
        self._pools = context.pools
        journal = None if context.new_journal_writer is None else context.new_journal_writer()
        self._local_prefill = LocalPrefill(context.pools.prefill, context.pools.decode, journal)
        self._metrics = context.metrics
        self._releaser = context.releaser
        self._kept_answers: KeptAnswers | None = None
        """The KV caches that decoders keep after answers; None if the protocol has none."""

    def make_both_legs(self, call: Call, request: PickRequest, timeline: Timeline) -> Legs:
        """Return both legs, or only a decode leg if the prompt is short or the decoder would finish it sooner.

        See DisaggregatedConnector.
        """
        kv = self._context.live.settings.kv
        if call.prompt_tokens < kv.prefill_min_tokens:
            self._metrics.prefills_skipped_total.inc()
            return self._one_engine.decoder.make_legs(call, request, timeline)
        if kv.skip_prefill:
            return self._legs_to_faster_role(call, request, timeline)
        return self._legs_to_both_engines(call, request, timeline)

    def skips_queue(self, request: PickRequest) -> bool:
        """Return whether a decoder is expected to send the first token sooner than the queue and a prefiller."""
        kv = self._context.live.settings.kv
        return bool(kv.skip_prefill) and self._local_prefill.skips_queue(
            request, kv.local_max_tokens, is_cautious=kv.skip_prefill == "auto"
        )

    def _legs_to_faster_role(self, call: Call, request: PickRequest, timeline: Timeline) -> Legs:
        """Run both legs, or only a decoder's if it is expected to be faster. LocalPrefill learns from the outcome."""
        local, usage = self._local_prefill, timeline.usage
        if usage.is_resumed:
            yield from self._legs_to_both_engines(call, request, timeline)
            return
        prompt = make_prompt_costs(request)
        kv = self._context.live.settings.kv
        choice = local.find_faster_decoder(prompt, kv.local_max_tokens, is_cautious=kv.skip_prefill == "auto")
        if choice is None:
            yield from self._legs_to_both_engines(call, request, timeline)
            if timeline.kv != "local" and not usage.is_resumed:
                local.learn_from_handoff(
                    timeline.decoder, prompt, _first_token_listener(timeline), usage.completion_tokens or 0
                )
            return
        self._metrics.prefills_skipped_total.inc()
        self._pools.prefill.policy.record_local_turn(request)
        chosen = replace(request, preferred_backend=choice.decoder, computes_prompt=call.stream)
        try:
            yield from self._one_engine.decoder.make_legs(call, chosen, timeline)
        except UpstreamError as error:
            if error.is_engine_breakdown:
                local.record_failure()
            raise
        tokens, cached = usage.prompt_tokens, usage.cached_tokens
        prompt_counts = None if tokens is None or cached is None else (tokens, cached)
        local.learn_from_local_prefill(
            timeline.decoder, choice, _first_token_listener(timeline), usage.completion_tokens or 0, prompt_counts
        )

    def _legs_to_both_engines(self, call: Call, request: PickRequest, timeline: Timeline) -> Legs:
        balance = self._context.live.settings.balance
        with KvHandoff(self._context, call, request, timeline, self.least_tokens) as handoff:
            timeline.enter_stage(_PREFILL_STAGE)
            asks_again = True
            kept_answers, kept = self._kept_answers, None
            if kept_answers is not None:
                handoff.kept_answers = kept_answers
                if kept_answers.answers:
                    kept = yield from kept_answers.find(call, handoff.prefiller.backend)
            while True:
                rank = self._ranks.start_claim() if balance.prefill_dp_ranks > 1 else None
                prefilled: PrefillAnswerBody | None = None
                try:
                    answer, body = yield self._prefill_leg(call, handoff, rank, timeline, kept)
                    prefilled = parse_prefilled(answer, body)
                except UpstreamError as error:
                    if kept is None or error.failure is not Failure.STATUS or not error.is_engine_breakdown:
                        self.record_prefill_failure(call, error)
                        raise
                finally:
                    if rank is not None:
                        rank.release_ranks()
                if kept is not None:
                    self._record_read_back(kept, "failed" if prefilled is None else "read")
                    kept = None
                if prefilled is None:  # the decoder may have lost the cache, so the prefiller computes the prompt
                    continue
                prompt_counts = timeline.usage.add_prompt_usage(prefilled.read_usage)
                params, kv = _parse_kept_kv(prefilled, call, handoff.prefiller.backend)
                if kv is None and prefilled.ended_by_stop:
                    self.allow_decode_without_kv(handoff, answer)
                    break
                if self.accepts_prefill_answer(call, handoff, answer, kv, asks_again):
                    break
                asks_again = False
                timeline.record_prefiller_replaced(handoff.prefiller.backend_pick)
            if kv is None:
                handoff.source = self.source_without_kv
            is_local = handoff.source is DECODER_SOURCE
            handoff.record_prefill(*prompt_counts)
            handoff.record_kv_held(kv)
            rank = self._ranks.start_claim() if balance.decode_dp_ranks > 1 else None
            try:
                body = _make_decode_body(call, None if is_local else params)
                # An answer that is not streamed arrives in one piece, so its handoff and decoding cannot be separated.
                timeline.enter_stage(_HANDOFF_STAGE if call.stream else _STREAM_STAGE)
                while True:
                    try:
                        response: Response = yield self._decode_leg(call, body, handoff, rank, timeline)
                        break
                    except UpstreamError as error:
                        self._move_to_another_decoder(handoff, error, timeline)
                del answer, body, prefilled, params  # a long answer would keep these kilobytes
                with response:
                    if not response.is_success:
                        raise make_refusal(response, (yield response))
                    if call.stream:
                        timeline.enter_stage(_FIRST_TOKEN_STAGE)
                    yield Attempt(response, timeline, handoff.prefiller.backend, not is_local, handoff)
            finally:
                if rank is not None:
                    rank.release_ranks()

    # Decisions of a protocol

    @abstractmethod
    def record_prefill_failure(self, call: Call, error: UpstreamError) -> None:
        """Handle a prefill leg that failed or whose answer was lost."""

    @abstractmethod
    def accepts_prefill_answer(
        self, call: Call, handoff: KvHandoff, answer: EngineAnswer, kv: PrefilledKv | None, asks_again: bool
    ) -> bool:
        """Return whether to send the decode leg after this prefill. Otherwise the prefill leg is sent again.

        `kv`: the KV that the answer names for a decoder; None: it names none. `asks_again`: whether the prefill
        leg may be sent again. Raises UpstreamError.
        """

    @abstractmethod
    def allow_decode_without_kv(self, handoff: KvHandoff, answer: EngineAnswer) -> None:
        """Let the decoder compute a prompt whose prefill ended by an end-of-sequence token, so that no KV was kept.

        Raises UpstreamError if decoders may not compute prompts.
        """

    # Legs

    def _record_read_back(self, kept: KeptAnswer, result: str) -> None:
        """Count a prefill leg that named a decoder's KV cache. `result`: `read`, or `failed`."""
        assert self._kept_answers is not None
        self._metrics.read_backs_total.labels(result).inc()
        if result == "read":
            self._kept_answers.note_read(kept)

    def _prefill_leg(
        self, call: Call, handoff: KvHandoff, rank: RankClaim | None, timeline: Timeline, kept: KeptAnswer | None
    ) -> EngineLeg:
        """Return the prefill leg. `kept`: the KV cache of a decoder that the prefiller reads; None: there is none."""
        prefiller = handoff.prefiller.backend
        timeline.prefiller, timeline.prefill_id = prefiller.name, new_attempt_id()
        headers = {**call.headers, "x-request-id": timeline.prefill_id}
        if rank is not None:
            headers |= rank.rank_header(prefiller, self._context.live.settings.balance.prefill_dp_ranks)
        if kept is None:
            body = _PREFILL_BODY_MAKER.make_body(call, self._pools.prefill, prefiller)
        else:
            body = make_prefill_body(call, self._pools.prefill, prefiller, kept.params)
        seconds = prefill_timeout_seconds(self._context.live.settings.timeouts, call)
        return EngineLeg(
            prefiller,
            call.api.path,
            body,
            headers,
            seconds,
            wants_whole_body=True,
            preconnect_to=handoff.decoder.backend,
        )

    def _decode_leg(
        self, call: Call, body: Body, handoff: KvHandoff, rank: RankClaim | None, timeline: Timeline
    ) -> EngineLeg:
        decoder = handoff.decoder.backend
        timeline.decoder, timeline.decode_id = decoder.name, timeline.prefill_id
        headers = {**call.headers, "x-request-id": timeline.prefill_id}
        if rank is not None:
            # Any rank can fetch the KV of any rank of the prefiller, which the parameters name.
            headers |= rank.rank_header(decoder, self._context.live.settings.balance.decode_dp_ranks)
        return EngineLeg(decoder, call.api.path, body, headers, self._handoff_seconds(handoff.prefilled_kv, call))

    def _move_to_another_decoder(self, handoff: KvHandoff, error: UpstreamError, timeline: Timeline) -> None:
        """Move to another decoder after a refused connection. The refused request has not used the KV.

        Raises `error` if it is another failure, and NoBackendAvailable if there is no other decoder.
        """
        if error.failure is not Failure.CONNECT:
            raise error
        if not self.move_lease(handoff.decoder, handoff.failed_error, error):
            # Another prefill would only pin more KV cache that no decoder pulls.
            raise NoBackendAvailable(Role.DECODE) from error
        timeline.record_decoder_replaced(handoff.decoder.backend_pick)
        self._metrics.retries_total.labels(Role.DECODE.value, error.failure.value).inc()

    def _handoff_seconds(self, kv: PrefilledKv | None, call: Call) -> float:
        """Return the time limit until a decoder's answer begins, in seconds.

        The prefiller may reuse the blocks after this time, so a later fetch could get wrong data. An answer that is not
        streamed begins only when it is complete.
        """
        timeouts = self._context.live.settings.timeouts
        if not call.stream:
            return first_byte_timeout_seconds(timeouts, call)
        if kv is None:
            return timeouts.handoff_seconds
        lease_seconds = self._releaser.pin_seconds(kv.prefiller, kv.transfer)
        return min(timeouts.handoff_seconds, lease_seconds / 2)

    @staticmethod
    def move_lease(lease: Lease, failed: set[Backend], error: UpstreamError) -> bool:
        """Move a lease to a backend that has not failed in this attempt. Return False if there is none."""
        failed.add(error.backend)
        try:
            lease.move_to_other_backend(failed, cause=error)
        except NoBackendAvailable:
            return False
        return True


def _first_token_listener(timeline: Timeline) -> FirstToken | None:
    """Return the time of the first token, and the seconds since the decode leg was sent; None if they are not known."""
    stages, times = timeline.entered_stages, timeline.stage_times
    if _FIRST_TOKEN_STAGE not in stages[:-1]:
        return None
    at = times[stages.index(_FIRST_TOKEN_STAGE) + 1]
    seconds = timeline.seconds_by_stage
    return FirstToken(at, seconds.get(_HANDOFF_STAGE, 0.0) + seconds[_FIRST_TOKEN_STAGE])


def _parse_kept_kv(
    answer: PrefillAnswerBody, call: Call, prefiller: Backend
) -> tuple[bytes | None, PrefilledKv | None]:
    """Return a prefiller's `kv_transfer_params` verbatim, and the KV that they name for a decoder.

    The parameters are None if they are missing or empty. The KV is None if they name no KV to fetch.
    """
    params = bytes(answer.kv_transfer_params)
    try:
        parsed = parse_kv_params(params)
    except msgspec.DecodeError:
        return None, None
    if parsed.do_remote_prefill is not True:
        return params if params[1:-1].strip() else None, None
    return params, PrefilledKv(prefiller, params, parsed.transfer_protocol, call.prompt_tokens, call.headers)


def _make_decode_body(call: Call, params: bytes | None) -> Body:
    """Return the body of the decode leg: the prefiller's `kv_transfer_params`, followed by the call's own members."""
    if call.kv_params:
        members = orjson.dumps(dict(call.kv_params))
        params = members if params is None else params[:-1] + b"," + members[1:]
    if params is None:
        return call.make_body({})
    return call.document.with_raw_member(call.changes, "kv_transfer_params", params)


class VllmPull(SequentialConnector):
    """The pull protocol: the decoder pulls the KV cache from the prefiller.

    Used with vLLM's NixlConnector and vLLM-Ascend's MooncakeConnector. `kv_transfer_params` in the prefiller's answer
    name the KV cache to fetch. Without them the decoder would compute the prompt again.
    """

    source_without_kv = KvSource.DECODER

    def __init__(self, context: ConnectorContext) -> None:
        super().__init__(context)
        self._kept_answers = KeptAnswers(context.pools, context.releaser, context.live)

    def record_prefill_failure(self, call: Call, error: UpstreamError) -> None:
        """Release the KV that the prefiller may keep after such a failure."""
        self._releaser.add_possible_orphan(error.backend, call.prompt_tokens, error)

    def accepts_prefill_answer(
        self, call: Call, handoff: KvHandoff, answer: EngineAnswer, kv: PrefilledKv | None, asks_again: bool
    ) -> bool:
        """Return False once for an answer without KV parameters, if `kv.on_missing` demands another prefill."""
        lease = handoff.prefiller
        self._context.compatibility.record_prefill(lease.backend, kv is not None)
        if kv is not None:
            if kv.transfer is KvTransfer.NIXL_PUSH:
                self._context.compatibility.set_finding(lease.backend, IncompatibilityKind.CONNECTOR, _PUSH_HINT)
            return True
        asks_again = asks_again and self._context.live.settings.kv.on_missing == "retry_prefill"
        # A long prompt on a decoder stalls every stream that it serves.
        is_short = call.prompt_tokens <= self._context.live.settings.kv.local_max_tokens
        if not asks_again:
            self._let_decoder_compute(answer, is_short=is_short)
            return True
        self._metrics.missing_kv_total.labels("retry_prefill").inc()
        self.move_lease(
            lease, handoff.failed_error, _make_missing_kv_error(answer)
        )  # the same prefiller again if there is no other
        return False

    def allow_decode_without_kv(self, handoff: KvHandoff, answer: EngineAnswer) -> None:
        """Allow long prompts, too: a second prefill would keep no KV either, and the call would fail."""
        self._let_decoder_compute(answer, is_short=True)

    def _let_decoder_compute(self, answer: EngineAnswer, *, is_short: bool) -> None:
        """Count an answer without KV by the effect of `kv.on_missing`.

        Raises UpstreamError if the decoder may not compute.
        """
        on_missing = self._context.live.settings.kv.on_missing
        local = on_missing == "local" or (on_missing == "retry_prefill" and is_short)
        self._metrics.missing_kv_total.labels("local" if local else "error").inc()
        if not local:
            missing = _make_missing_kv_error(answer)
            missing.code = "kv_handoff_failed"
            raise missing


def _make_missing_kv_error(answer: EngineAnswer) -> UpstreamError:
    return answer.make_failure(Failure.MISSING_KV, "the answer has no KV parameters for a decoder")


class VllmStore(SequentialConnector):
    """The protocol of KV stores that all engines share: the decoder finds the KV cache in the store.

    Used with vLLM's MooncakeStoreConnector and vLLM-Ascend's AscendStoreConnector and UCMConnector. Their
    `request_finished` returns nothing for a decoder, which looks blocks up by the hashes of the prompt's tokens. In a
    MultiConnector another connector may return KV parameters, which go to the decoder verbatim.
    """

    least_tokens = MIN_STORED_TOKENS
    source_without_kv = KvSource.STORE

    def record_prefill_failure(self, call: Call, error: UpstreamError) -> None:
        """Do nothing, because stored KV needs no release."""

    def accepts_prefill_answer(
        self, call: Call, handoff: KvHandoff, answer: EngineAnswer, kv: PrefilledKv | None, asks_again: bool
    ) -> bool:
        """Accept any answer."""
        return True

    def allow_decode_without_kv(self, handoff: KvHandoff, answer: EngineAnswer) -> None:
        """Do nothing, because the store has the KV of every prompt, however its prefill ended."""
