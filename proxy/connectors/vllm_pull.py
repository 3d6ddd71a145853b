"""vLLM pull protocol: prefill first, then the decoder pulls the KV cache from the prefiller.

Spoken by vLLM's NixlConnector and vLLM-Ascend's MooncakeConnector. The prefiller's answer carries `kv_transfer_params`,
which go to the decoder verbatim: opaque, and used once. The decoder is reserved before the prefiller is called, so
that KV cache is never pinned while no decoder has room for it.
"""

from __future__ import annotations

from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import orjson

from proxy.balancer.backend import Role
from proxy.connectors.base import (
    Attempt,
    check_status,
    new_attempt_id,
    parse_answer,
    prefill_seconds,
    refusal,
)
from proxy.connectors.kv_transfer import kv_transfer
from proxy.connectors.releaser import PrefilledKv
from proxy.errors import BadRequest, Failure, NoBackendAvailable, UpstreamError
from proxy.record import Journey, Stage
from proxy.wire.document import REMOVED

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Collection, Mapping, Sequence

    from aiohttp import web

    from proxy.balancer.backend import Backend
    from proxy.balancer.lease import Lease
    from proxy.call import Call
    from proxy.connectors.base import Kit
    from proxy.settings import Settings
    from proxy.upstream import Response
    from proxy.wire.document import Document

# Only do_remote_decode is read by the engines; the rest is what every proxy for this protocol sends.
_ASK_FOR_KV: Final = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}

# The prefiller returns KV parameters only if it stops for length after its one token, so `min_tokens` keeps an
# end-of-sequence token from ending it first (vLLM v1/core/sched/utils.py check_stop). The token itself is thrown away:
# the decoder computes the last prompt position again and samples for itself.
_PREFILL_CHANGES: Final[dict[str, object]] = {
    "stream": False,
    "max_tokens": 1,
    "min_tokens": 1,
    "stream_options": REMOVED,
    "logprobs": REMOVED,
    "top_logprobs": REMOVED,
    "return_token_ids": REMOVED,
}

# Before this version a forced tool call fails with 500 on a one-token answer, after the KV cache was pinned: `assert
# content is not None` in vLLM 0.18 entrypoints/openai/engine/serving.py. The prompt is the same with "auto".
_TOOL_CHOICE_FIXED: Final = (0, 23)


class VllmPull:
    """Prefill → decode, one after the other."""

    roles: tuple[Role, ...] = (Role.PREFILL, Role.DECODE)
    one_sequence_per_call = True
    continues_answers = True

    def __init__(self, kit: Kit) -> None:
        self._pools = kit.pools
        self._upstream = kit.upstream
        self._timeouts = kit.settings.timeouts
        self._kv = kit.settings.kv
        self._metrics = kit.metrics
        self._releaser = kit.releaser

    def check(self, call: Call) -> None:
        """Refuse what one set of KV parameters cannot express, or what only the prefiller's discarded answer has."""
        values = call.values
        if values.get("use_beam_search"):
            raise BadRequest("beam search is not supported with prefill/decode disaggregation", param="use_beam_search")
        best_of = values.get("best_of")
        if isinstance(best_of, int) and best_of > call.samples:
            raise BadRequest("best_of larger than n is not supported", param="best_of")
        if values.get("prompt_logprobs") is not None:
            raise BadRequest(
                "prompt_logprobs is not supported with prefill/decode disaggregation", param="prompt_logprobs"
            )
        if values.get("echo") and values.get("logprobs") is not None:
            raise BadRequest("echo with logprobs is not supported with prefill/decode disaggregation", param="echo")

    def configure(self, settings: Settings) -> None:
        """Take changed settings for what is opened from now on."""
        self._timeouts = settings.timeouts
        self._kv = settings.kv

    def routes(self) -> Sequence[web.RouteDef]:
        """Engines call nobody."""
        return ()

    @asynccontextmanager
    async def open(
        self, call: Call, avoid: Collection[Backend], journey: Journey, prefer: Backend | None = None
    ) -> AsyncIterator[Attempt]:
        """Both legs. See Connector.open."""
        with (
            self._pools.decode.lease(call.decode_load, avoid) as decoder,
            self._pools.prefill.lease(
                call.prefill_load, self._pools.unpaired(decoder.backend, avoid), prefer
            ) as prefiller,
        ):
            journey.begin_attempt()
            handover = await self._prefill(call, prefiller, avoid, journey)
            prefiller.free_compute()
            with self._releaser.custody(handover.kv, avoid) as custody:

                def on_arrival(works: bool) -> None:
                    prefiller.free_kv()
                    custody.end(decoder.backend, works)
                    if works:
                        decoder.confirm()

                with await self._decode(call, handover, decoder, custody.failed, journey) as response:
                    await check_status(response)
                    if call.stream:
                        journey.enter(Stage.FIRST_TOKEN)
                    yield Attempt(
                        response,
                        journey,
                        prefiller=prefiller.backend,
                        kv_handed_over=handover.kv is not None,
                        on_arrival=on_arrival,
                    )

    async def _prefill(self, call: Call, lease: Lease, avoid: Collection[Backend], journey: Journey) -> _Handover:
        """Run the prefill leg; ask a second time, if so configured, when the answer has no KV parameters."""
        journey.enter(Stage.PREFILL)
        may_ask_again = self._kv.on_missing == "retry_prefill"
        while True:
            attempt_id = new_attempt_id()
            journey.prefiller = lease.backend.name
            try:
                response, answer = await self._ask_prefiller(call, lease.backend, attempt_id)
            except UpstreamError as error:
                self._releaser.suspect(lease.backend, call.prompt_tokens, error)
                raise
            journey.saw_prompt_usage(answer.values.get("usage"))
            kv = _prefilled_kv(answer, call, lease.backend)
            if kv is not None:
                return _Handover(attempt_id, kv)
            missing = response.fail(Failure.MISSING_KV, "the answer has no KV parameters for a decoder")
            if not may_ask_again:
                self._go_without_kv(call, missing)
                return _Handover(attempt_id, None)
            may_ask_again = False
            self._metrics.missing_kv_total.labels("retry_prefill").inc()
            self._moved(lease, set(avoid), missing)  # the same prefiller once more where there is no other

    async def _ask_prefiller(self, call: Call, prefiller: Backend, attempt_id: str) -> tuple[Response, Document]:
        response, body = await self._upstream.fetch(
            prefiller,
            call.api.path,
            call.body(self._prefill_changes(call, prefiller)),
            {**call.headers, "x-request-id": attempt_id},
            silence_seconds=prefill_seconds(self._timeouts, call),
        )
        if response.status != 200:
            raise refusal(response, body)
        return response, parse_answer(response, body)

    def _prefill_changes(self, call: Call, prefiller: Backend) -> dict[str, object]:
        """What is different in the prefill leg's body."""
        changes: dict[str, object] = {"kv_transfer_params": {**_ASK_FOR_KV, **call.kv_params}, **_PREFILL_CHANGES}
        if "max_completion_tokens" in call.values:
            changes["max_completion_tokens"] = 1
        tool_choice = call.values.get("tool_choice")
        if isinstance(tool_choice, dict) or tool_choice == "required":
            version = self._pools.prefill.engine_version(prefiller)
            if version is not None and version < _TOOL_CHOICE_FIXED:
                changes["tool_choice"] = "auto"
        return changes

    def _go_without_kv(self, call: Call, missing: UpstreamError) -> None:
        """Let the decoder prefill by itself where the policy allows it; otherwise raise `missing`."""
        local = self._kv.on_missing == "local" or (
            # A decoder is sized for decoding: a long prompt there stalls every stream it serves.
            self._kv.on_missing == "retry_prefill" and call.prompt_tokens <= self._kv.local_max_tokens
        )
        self._metrics.missing_kv_total.labels("local" if local else "error").inc()
        if not local:
            missing.code = "kv_handoff_failed"
            raise missing

    async def _decode(
        self, call: Call, handover: _Handover, lease: Lease, refused: set[Backend], journey: Journey
    ) -> Response:
        """Open the decode leg. A refused connection has used nothing, so the same KV goes to another decoder, which is
        not one of `refused`.
        """
        params = _decode_params(handover.kv, call.kv_params)
        body = call.body({} if params is None else {"kv_transfer_params": orjson.Fragment(params)})
        # An answer that is not streamed comes in one piece at the end: its hand-over cannot be told from its decoding.
        journey.enter(Stage.HANDOFF if call.stream else Stage.STREAM)
        while True:
            journey.decoder = lease.backend.name
            try:
                return await self._upstream.open(
                    lease.backend,
                    call.api.path,
                    body,
                    {**call.headers, "x-request-id": handover.attempt_id},
                    silence_seconds=self._handoff_seconds(handover.kv, call),
                )
            except UpstreamError as error:
                if error.failure is Failure.CONNECT and self._moved(lease, refused, error):
                    self._metrics.retries_total.labels(Role.DECODE.value, error.failure.value).inc()
                    continue
                if error.failure is Failure.CONNECT:
                    # Nobody is left to ask: another prefill would only pin more KV cache that nobody pulls.
                    raise NoBackendAvailable(Role.DECODE) from error
                raise

    def _handoff_seconds(self, kv: PrefilledKv | None, call: Call) -> float:
        """How long a decoder may take to answer at all. One that came back later might fetch blocks that the prefiller
        has given to others meanwhile. An answer that is not streamed says nothing before its end.
        """
        if not call.stream:
            return self._timeouts.answer_seconds
        if kv is None:
            return self._timeouts.handoff_seconds
        lease_seconds = self._releaser.pin_seconds(kv.prefiller, kv.transfer)
        return min(self._timeouts.handoff_seconds, lease_seconds / 2)

    @staticmethod
    def _moved(lease: Lease, refused: set[Backend], error: UpstreamError) -> bool:
        """Move a lease to a backend that has not failed this attempt; False when there is none."""
        refused.add(error.backend)
        try:
            lease.move(refused, because=error)
        except NoBackendAvailable:
            return False
        return True


@dataclass(frozen=True, slots=True)
class _Handover:
    """What the decode leg gets from the prefill leg. `kv` None: the decoder prefills by itself."""

    attempt_id: str
    kv: PrefilledKv | None


def _prefilled_kv(answer: Document, call: Call, prefiller: Backend) -> PrefilledKv | None:
    """The KV that a prefiller's answer names; None when there is none that a decoder could use."""
    params = answer.values.get("kv_transfer_params")
    if not isinstance(params, dict) or params.get("do_remote_prefill") is not True:
        return None
    raw = answer.raw_value("kv_transfer_params")
    assert raw is not None
    return PrefilledKv(prefiller, raw, kv_transfer(params), call.prompt_tokens, call.headers)


def _decode_params(kv: PrefilledKv | None, extra: Mapping[str, object]) -> bytes | None:
    """`kv_transfer_params` of the decode leg: the prefiller's very bytes, and the call's own members behind them."""
    if not extra:
        return None if kv is None else kv.params
    members = orjson.dumps(dict(extra))
    return members if kv is None else kv.params[:-1] + b"," + members[1:]
