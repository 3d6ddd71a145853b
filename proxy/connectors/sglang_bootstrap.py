"""SGLang's protocol: prefiller and decoder get the same request at once and meet in a bootstrap room.

Both bodies are the client's with four more members: host and port of the prefiller's bootstrap server, the room's
number and the request's id. Only the decoder is asked for token ids. SGLang's prefiller limits itself to one token, so
sampling parameters stay unchanged, and it answers when the decoder has the KV cache
(`process_disagg_prefill_inflight_queue`). An engine whose partner fails would wait for minutes, so pdproxy sends it an
abort of the request.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, Final
from weakref import WeakValueDictionary

import orjson

from proxy.common.backend import Backend, Role
from proxy.common.errors import Failure, UpstreamError
from proxy.common.terms import Stage
from proxy.connectors.base import (
    Connector,
    ConnectorContext,
    first_byte_timeout_seconds,
    make_refusal,
    new_attempt_id,
    prefill_timeout_seconds,
)
from proxy.connectors.handoff import KvHandoff
from proxy.connectors.legs import Attempt, EngineLeg, LegPair, RankCounts
from proxy.connectors.one_engine import SingleLegMaker, asks_for_echoed_logprobs, make_echo_error
from proxy.wire import sglang
from proxy.wire.document import REMOVED
from proxy.wire.openai import OPENAI_APIS, Api
from proxy.wire.sglang import ERROR_HEADERS, find_answer_error

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from proxy.balancer.pick import PickRequest
    from proxy.common.background import BackgroundTasks
    from proxy.connectors.legs import Legs, RankClaim
    from proxy.dialects.call import Call
    from proxy.observe.timeline import Timeline
    from proxy.upstream import Response, Upstream

# The host of requests without a decoder (`FAKE_BOOTSTRAP_HOST` in disaggregation/utils.py), which engines use for their
# own warm-up requests and health checks.
_FAKE_HOST: Final = "2.2.2.2"
# Members that ask for token ids.
_TOKEN_ID_MEMBERS: Final = ("return_token_ids",)
# The number of rooms: engines use signed 64-bit numbers. Room 0 belongs to their health checks.
_ROOM_COUNT: Final = 1 << 63
_ABORT_TIMEOUT_SECONDS: Final = 2.0
_MAX_ABORTS_AT_ONCE: Final = 8
_MAX_ABORTS_PENDING: Final = 1024


class SglangBootstrap(Connector):
    """Runs the prefill leg beside the decode leg, with the same request."""

    apis: Sequence[Api] = (*OPENAI_APIS, Api.GENERATE)

    def __init__(self, context: ConnectorContext) -> None:
        super().__init__(context)
        self._ranks = RankCounts()
        self._aborts = AbortSender(context.upstream, context.background)
        self._prefiller = SingleLegMaker(context, Role.PREFILL, self._ranks, _fake_bootstrap_members)

    def check_call(self, call: Call) -> None:
        """Raise BadRequest for echoed log probabilities, because the decoder does not have them."""
        if asks_for_echoed_logprobs(call) and not call.needs_only_prefill:
            raise make_echo_error()

    def splits_into_units(self, call: Call) -> bool:
        """Return True, because samples would share one room (`_handle_batch_request`, tokenizer_manager.py)."""
        return True

    def make_legs(self, call: Call, request: PickRequest, timeline: Timeline) -> Legs:
        """Return the legs of an attempt: both, or only the prefiller's if the call needs no decoder."""
        if _needs_only_prefill(call):
            return self._prefiller.make_legs(call, request, timeline)
        return self._legs_of_pair(call, request, timeline)

    def _legs_of_pair(self, call: Call, request: PickRequest, timeline: Timeline) -> Legs:
        with (
            KvHandoff(self._context, call, request, timeline) as handoff,
            self._ranks.start_claim() as claim,
        ):
            prefiller, decoder = handoff.prefiller.backend, handoff.decoder.backend
            if self._allocates_after_prefill(decoder):
                handoff.decoder.defer_kv_charge()
            timeline.prefiller, timeline.decoder = prefiller.name, decoder.name
            # A prefiller answers when the transfer has ended (`process_disagg_prefill_inflight_queue`, prefill.py).
            handoff.answers_after_transfer = True
            timeline.enter_stage(Stage.PREFILL)
            legs = SglangLegs(call, handoff, claim, timeline, self._context.live.settings.sglang.dp_size)
            timeline.prefill_id = timeline.decode_id = legs.request_id
            handoff.record_kv_held()  # the engines meet at once, and either of them may report a failure
            try:
                pair = LegPair(self._prefill_leg(legs), self._decode_leg(legs), legs.read_prefill_answer)
                with pair:
                    response: Response = yield pair
                    with response:
                        if not response.is_success:
                            raise make_refusal(response, (yield response))
                        legs.note_decoder_output()
                        # The decoder gets the number of cached tokens from the prefiller (`_commit_transfer_to_req`),
                        # so its usage needs no correction.
                        yield Attempt(
                            response,
                            timeline,
                            prefiller=prefiller,
                            has_kv_from_prefiller=False,
                            handoff=handoff,
                            first_token_seconds=self._decode_seconds(call),
                            prefill_answer=_PrefillAnswer(legs, pair),
                        )
            except BaseException as error:
                if isinstance(error, UpstreamError):
                    legs.note_failure(error)
                for backend in legs.working_backends:
                    self._aborts.send_abort(backend, legs.request_id, call.headers)
                raise

    def _allocates_after_prefill(self, decoder: Backend) -> bool:
        """Return whether the decoder takes KV memory only when the prompt is computed.

        With `prefill_complete` it allocates after the prefiller has reported the end of its computation
        (`MooncakeKVReceiver.poll` in SGLang 0.5.23, PR #40703).
        """
        health = self._context.pools.decode.health.health_by_backend.get(decoder)
        setup = None if health is None or health.engine_facts is None else health.engine_facts.identity.engine_setup
        return setup is not None and setup.allocates_after_prefill

    def _prefill_leg(self, legs: SglangLegs) -> EngineLeg:
        call, timeouts = legs.call, self._context.live.settings.timeouts
        return EngineLeg(
            legs.prefiller, call.api.path, legs.prefill_body, legs.headers, prefill_timeout_seconds(timeouts, call)
        )

    def _decode_leg(self, legs: SglangLegs) -> EngineLeg:
        """Return the decode leg of an attempt with SGLang.

        The decoder's status line arrives with its first token; some engines send it earlier.
        """
        call = legs.call
        return EngineLeg(legs.decoder, call.api.path, legs.decode_body, legs.headers, self._decode_seconds(call))

    def _decode_seconds(self, call: Call) -> float:
        """Return the time limit until a decoder's answer begins, in seconds. It includes the prefill."""
        timeouts = self._context.live.settings.timeouts
        return prefill_timeout_seconds(timeouts, call) + first_byte_timeout_seconds(timeouts, call)


class SglangLegs:
    """The prefill leg and the decode leg of one attempt: their bodies, and the engines that work on them."""

    def __init__(self, call: Call, handoff: KvHandoff, claim: RankClaim, timeline: Timeline, dp_size: int) -> None:
        self.call = call
        self.prefiller = handoff.prefiller.backend
        self.decoder = handoff.decoder.backend
        self.request_id = new_attempt_id()
        rank = claim.claim_rank(self.prefiller, dp_size)
        members = bootstrap_members(self.prefiller, self.request_id, rank, dp_size)
        self.decode_body = self.prefill_body = call.make_body(members)
        if call.read_members(_TOKEN_ID_MEMBERS):
            # The ids in the prefiller's answer are not used, and would be as long as the prompt.
            self.prefill_body = call.make_body({**members, **dict.fromkeys(_TOKEN_ID_MEMBERS, REMOVED)})
        self.headers = {**call.headers, "x-request-id": self.request_id}
        self.working_backends = {self.prefiller, self.decoder}
        """Engines that may have received the request and have not ended it."""
        self.prefill_answer_body: bytes | None = None
        """The prefiller's answer; None until it has arrived."""
        self._handoff = handoff
        self._claim = claim
        self._timeline = timeline
        self._decoder_answers = False

    def read_prefill_answer(self, response: Response, answer: bytes) -> None:
        """Read the prefiller's complete answer, which shows that the decoder has the KV cache.

        Raises UpstreamError if it failed.
        """
        if response.status != 200:
            raise make_refusal(response, answer)
        if (error := find_answer_error(answer)) is not None:
            if error.is_requested:
                raise response.make_failure(Failure.ABORTED, "aborted the prefill")
            raise response.make_refusal("reported an error in its answer", error.status, error.body, ERROR_HEADERS)
        self.prefill_answer_body = answer
        self.working_backends.discard(self.prefiller)
        self._handoff.prefiller.release_compute()
        self._handoff.decoder.charge_deferred_kv()
        self._claim.release_ranks()
        if self._timeline.current_stage is Stage.PREFILL:
            self._enter_next_stage()

    def note_decoder_output(self) -> None:
        """Record that the decoder's status line has arrived. Some engines send it before their first output."""
        self._decoder_answers = True
        if self._timeline.current_stage is Stage.HANDOFF:
            self._enter_next_stage()

    def note_failure(self, error: UpstreamError) -> None:
        """Record which engine does not work on the request, because it rejected it or was not reached."""
        if error.failure in (Failure.CONNECT, Failure.STATUS):
            self.working_backends.discard(error.backend)

    def _enter_next_stage(self) -> None:
        if not self.call.stream:
            self._timeline.enter_stage(Stage.STREAM)
        else:
            self._timeline.enter_stage(Stage.FIRST_TOKEN if self._decoder_answers else Stage.HANDOFF)


class _PrefillAnswer:
    """See PrefillAnswer."""

    def __init__(self, legs: SglangLegs, pair: LegPair) -> None:
        self._legs = legs
        self._pair = pair

    @property
    def body_or_none(self) -> bytes | None:
        return self._legs.prefill_answer_body

    async def wait_for_body(self) -> bytes:
        assert self._pair.wait_for_prefill_end is not None  # a caller in a task has a driver that can wait
        await self._pair.wait_for_prefill_end()
        assert self._legs.prefill_answer_body is not None
        return self._legs.prefill_answer_body


def bootstrap_members(prefiller: Backend, attempt_id: str, rank: int, dp_size: int) -> dict[str, object]:
    """Return the request members by which SGLang's two engines meet and by which pdproxy can abort the attempt.

    A room is derived from the random id of the attempt, so no other process uses it. Without a port the engines use
    their own setting (`disaggregation_bootstrap_port`).
    """
    return {
        "bootstrap_host": f"[{prefiller.host}]" if ":" in prefiller.host else prefiller.host,
        "bootstrap_port": prefiller.bootstrap_port,
        "bootstrap_room": choose_room_of_rank(int(attempt_id[:16], 16), rank, dp_size),
        "rid": attempt_id,
    }


def _fake_bootstrap_members(attempt_id: str) -> dict[str, object]:
    """Return the members for a request to a prefiller without a decoder.

    It then sends no KV cache and answers at once.
    """
    return {
        "bootstrap_host": _FAKE_HOST,
        "bootstrap_port": None,
        "bootstrap_room": choose_room_of_rank(int(attempt_id[:16], 16), 0, 1),
        "rid": attempt_id,
    }


def _needs_only_prefill(call: Call) -> bool:
    """Return whether a call asks only for the log probabilities of the prompt, and for at most one token."""
    if call.api is Api.GENERATE:
        return sglang.asks_only_for_prompt_logprobs(call.read_members(sglang.MEMBERS_NEEDING_PREFILL_ANSWER))
    return asks_for_echoed_logprobs(call) and call.needs_only_prefill


def choose_room_of_rank(drawn: int, rank: int, dp_size: int) -> int:
    """Return a room number in [1, 2**63) that belongs to a data-parallel rank.

    Engines choose the rank by `room % dp_size` (`follow_bootstrap_room`).
    """
    return (1 + drawn % (_ROOM_COUNT // dp_size - 1)) * dp_size + rank


class AbortSender:
    """Sends engines aborts of abandoned requests in the background.

    An engine notices a closed connection only after some seconds, and a lost partner after minutes. Aborts are
    optional. A failed abort is not repeated, and beyond a limit of pending aborts none is sent.
    """

    def __init__(self, upstream: Upstream, background: BackgroundTasks) -> None:
        self._upstream = upstream
        self._background = background
        self._places: WeakValueDictionary[Backend, asyncio.Semaphore] = WeakValueDictionary()

    def send_abort(self, backend: Backend, attempt_id: str, headers: Mapping[str, str]) -> None:
        """Send an engine the abort of an attempt. `headers`: may contain the credential that engines require."""
        if len(self._background) < _MAX_ABORTS_PENDING:
            places = self._places.setdefault(backend, asyncio.Semaphore(_MAX_ABORTS_AT_ONCE))
            self._background.start_task(self._post_abort(backend, attempt_id, headers, places))

    async def _post_abort(
        self, backend: Backend, attempt_id: str, headers: Mapping[str, str], places: asyncio.Semaphore
    ) -> None:
        body = orjson.dumps({"rid": attempt_id})
        async with places:
            with suppress(UpstreamError):
                await self._upstream.post_and_read_body(
                    backend,
                    "/abort_request",
                    body,
                    headers,
                    answer_seconds=_ABORT_TIMEOUT_SECONDS,
                    resend_if_stale=True,
                )
