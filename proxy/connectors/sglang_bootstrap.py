"""SGLang's protocol: prefiller and decoder get the same request at the same time, and meet in a bootstrap room.

Both bodies are the client's with four members more: where the prefiller's bootstrap server is, the room's number and
the request's id. Token ids are asked of the decoder alone. SGLang's prefiller limits itself to one token, so no
sampling parameter is changed, and its answer comes when the decoder has the KV cache
(`process_disagg_prefill_inflight_queue`). An engine whose partner fails would wait for it for minutes: it is told to
abort the request.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, Final
from weakref import WeakValueDictionary

import orjson

from proxy.common.backend import Role
from proxy.common.errors import Failure, UpstreamError
from proxy.common.terms import Stage
from proxy.connectors.base import Connector, first_byte_seconds, new_attempt_id, prefill_seconds, refusal
from proxy.connectors.handoff import KvHandoff
from proxy.connectors.legs import Attempt, Leg, Pair, Ranks
from proxy.connectors.one_engine import SingleLeg, asks_for_echoed_logprobs, echo_refused
from proxy.wire import sglang
from proxy.wire.document import REMOVED
from proxy.wire.openai import OPENAI_APIS, Api
from proxy.wire.sglang_errors import ERROR_HEADERS, error_in_answer

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from proxy.balancer.pick import PickRequest
    from proxy.common.backend import Backend
    from proxy.common.background import Background
    from proxy.connectors.base import ConnectorContext
    from proxy.connectors.legs import Legs, RankClaim
    from proxy.dialects.call import Call
    from proxy.observe.timeline import Timeline
    from proxy.upstream import Response, Upstream
    from proxy.upstream.response import EngineResponse

# Where no decoder is (`FAKE_BOOTSTRAP_HOST` in disaggregation/utils.py): the engines' own warm-up requests and health
# checks go there.
_NOBODY: Final = "2.2.2.2"
# Members by which an answer has token ids.
_IDS: Final = ("return_token_ids",)
# A signed 64-bit number in the engines. Room 0 is that of their health checks.
_ROOMS: Final = 1 << 63
_ABORT_SECONDS: Final = 2.0
_MAX_ABORTS_AT_ONCE: Final = 8
_MAX_ABORTS_PENDING: Final = 1024


class SglangBootstrap(Connector):
    """Prefill and decode leg side by side."""

    apis: Sequence[Api] = (*OPENAI_APIS, Api.GENERATE)

    def __init__(self, context: ConnectorContext) -> None:
        super().__init__(context)
        self._ranks = Ranks()
        self._aborts = Aborts(context.upstream, context.background)
        self._prefiller = SingleLeg(context, Role.PREFILL, self._ranks, _nobodys_bootstrap)

    def check(self, call: Call) -> None:
        """Refuse what only the prefiller knows and OpenAI's answers have no place for."""
        if asks_for_echoed_logprobs(call) and not call.is_all_prompt:
            raise echo_refused()

    def splits(self, call: Call) -> bool:
        """The engine gives all samples of a request the same room (`_handle_batch_request` in tokenizer_manager.py)."""
        return True

    def legs(self, call: Call, request: PickRequest, timeline: Timeline) -> Legs:
        """Both legs, or the prefiller's alone. See Connector.legs."""
        if _is_about_prompt(call):
            return self._prefiller.legs(call, request, timeline)
        return self._both(call, request, timeline)

    def _both(self, call: Call, request: PickRequest, timeline: Timeline) -> Legs:
        with (
            KvHandoff(self._context, call, request, timeline) as handoff,
            self._ranks.claim() as claim,
        ):
            prefiller, decoder = handoff.prefiller.backend, handoff.decoder.backend
            timeline.prefiller, timeline.decoder = prefiller.name, decoder.name
            timeline.enter(Stage.PREFILL)
            legs = _Legs(call, handoff, claim, timeline, self._context.settings.sglang.dp_size)
            timeline.prefill_id = timeline.decode_id = legs.id
            handoff.held()  # the engines meet at once, and when that fails either of them may say so
            try:
                pair = Pair(self._prefill_leg(legs), self._decode_leg(legs), legs.read)
                with pair:
                    response: Response = yield pair
                    with response:
                        if not response.is_success:
                            raise refusal(response, (yield response))
                        legs.decoder_answers()
                        # The decoder knows from the prefiller how much of the prompt was cached
                        # (`_commit_transfer_to_req`), so what it tells is not corrected.
                        yield Attempt(
                            response,
                            timeline,
                            prefiller=prefiller,
                            kv_handed_over=False,
                            handoff=handoff,
                            first_token_seconds=self._decode_seconds(call),
                            prefill_answer=_PrefillAnswer(legs, pair),
                        )
            except BaseException as error:
                if isinstance(error, UpstreamError):
                    legs.failed(error)
                for backend in legs.at_work:
                    self._aborts.send(backend, legs.id, call.headers)
                raise

    def _prefill_leg(self, legs: _Legs) -> Leg:
        call, timeouts = legs.call, self._context.settings.timeouts
        return Leg(legs.prefiller, call.api.path, legs.prefill_body, legs.headers, prefill_seconds(timeouts, call))

    def _decode_leg(self, legs: _Legs) -> Leg:
        """Its status line comes with the first token, or before, from engines that hurry."""
        call = legs.call
        return Leg(legs.decoder, call.api.path, legs.decode_body, legs.headers, self._decode_seconds(call))

    def _decode_seconds(self, call: Call) -> float:
        """How long a decoder may take to begin its answer: it waits for the prefill first."""
        timeouts = self._context.settings.timeouts
        return prefill_seconds(timeouts, call) + first_byte_seconds(timeouts, call)


class _Legs:
    """The two legs of one attempt: what is sent, and who works on it."""

    def __init__(self, call: Call, handoff: KvHandoff, claim: RankClaim, timeline: Timeline, dp_size: int) -> None:
        self.call = call
        self.prefiller = handoff.prefiller.backend
        self.decoder = handoff.decoder.backend
        self.id = new_attempt_id()
        rank = claim.on(self.prefiller, dp_size)
        members = bootstrap(self.prefiller, self.id, rank, dp_size)
        self.decode_body = self.prefill_body = call.body(members)
        if call.members(_IDS):
            # The prefiller's answer is read by nobody, and would be as long as the prompt.
            self.prefill_body = call.body({**members, **dict.fromkeys(_IDS, REMOVED)})
        self.headers = {**call.headers, "x-request-id": self.id}
        self.at_work = {self.prefiller, self.decoder}
        """Engines that may have the request and have not ended it."""
        self.answer: bytes | None = None
        """The prefiller's; None until it has come."""
        self._handoff = handoff
        self._claim = claim
        self._timeline = timeline
        self._decoder_answers = False

    def read(self, response: EngineResponse, answer: bytes) -> None:
        """The prefiller has answered: the decoder has the KV cache. There is nothing in it for the client, unless it
        failed. Raises UpstreamError.
        """
        if response.status != 200:
            raise refusal(response, answer)
        if (told := error_in_answer(answer)) is not None:
            if told.is_wish:
                raise response.fail(Failure.ABORTED, "stopped working on the prompt")
            raise response.refuse("reported an error in its answer", told.status, told.body, ERROR_HEADERS)
        self.answer = answer
        self.at_work.discard(self.prefiller)
        self._handoff.prefiller.free_compute()
        self._claim.free()
        if self._timeline.stage is Stage.PREFILL:
            self._enter_next()

    def decoder_answers(self) -> None:
        """The decoder's status line has come. Some engines send it when they have nothing to tell yet."""
        self._decoder_answers = True
        if self._timeline.stage is Stage.HANDOFF:
            self._enter_next()

    def failed(self, error: UpstreamError) -> None:
        """An engine that refused, or was never reached, does not work on it."""
        if error.failure in (Failure.CONNECT, Failure.STATUS):
            self.at_work.discard(error.backend)

    def _enter_next(self) -> None:
        if not self.call.stream:
            self._timeline.enter(Stage.STREAM)
        else:
            self._timeline.enter(Stage.FIRST_TOKEN if self._decoder_answers else Stage.HANDOFF)


class _PrefillAnswer:
    """See PrefillAnswer."""

    def __init__(self, legs: _Legs, pair: Pair) -> None:
        self._legs = legs
        self._pair = pair

    @property
    def so_far(self) -> bytes | None:
        """The whole of it; None until it has come."""
        return self._legs.answer

    async def whole(self) -> bytes:
        """Wait for it. Raises UpstreamError."""
        assert self._pair.ended is not None  # what asks for it has a task
        await self._pair.ended()
        assert self._legs.answer is not None
        return self._legs.answer


def bootstrap(prefiller: Backend, attempt_id: str, rank: int, dp_size: int) -> dict[str, object]:
    """The members by which both engines find each other, and this attempt can be aborted.

    A room is as random as the attempt's id, so no other process has the same. None as the port: the engines' own
    setting (`disaggregation_bootstrap_port`).
    """
    return {
        "bootstrap_host": f"[{prefiller.host}]" if ":" in prefiller.host else prefiller.host,
        "bootstrap_port": prefiller.bootstrap_port,
        "bootstrap_room": room(int(attempt_id[:16], 16), rank, dp_size),
        "rid": attempt_id,
    }


def _nobodys_bootstrap(attempt_id: str) -> dict[str, object]:
    """What keeps a prefiller from waiting for a decoder: it sends the KV cache nowhere and gives its answer at once."""
    return {
        "bootstrap_host": _NOBODY,
        "bootstrap_port": None,
        "bootstrap_room": room(int(attempt_id[:16], 16), 0, 1),
        "rid": attempt_id,
    }


def _is_about_prompt(call: Call) -> bool:
    """Whether a prefiller's answer is all that is asked for: the prompt's log probabilities, and one token at most."""
    if call.api is Api.GENERATE:
        return sglang.is_about_prompt(call.members(sglang.ABOUT_PROMPT))
    return asks_for_echoed_logprobs(call) and call.is_all_prompt


def room(drawn: int, rank: int, dp_size: int) -> int:
    """A room in [1, 2**63) of a data-parallel rank: prefillers take `room % dp_size` (`follow_bootstrap_room`)."""
    return (1 + drawn % (_ROOMS // dp_size - 1)) * dp_size + rank


class Aborts:
    """Aborts requests that were given up, in the background.

    An engine notices a closed connection only after some seconds, and its partner's end after minutes. Nothing depends
    on it, so an abort that fails is not repeated, and those beyond the bound are left out.
    """

    def __init__(self, upstream: Upstream, background: Background) -> None:
        self._upstream = upstream
        self._background = background
        self._places: WeakValueDictionary[Backend, asyncio.Semaphore] = WeakValueDictionary()

    def send(self, backend: Backend, attempt_id: str, headers: Mapping[str, str]) -> None:
        """Have an engine abort this attempt. `headers`: the client's credential may be the engine's."""
        if len(self._background) < _MAX_ABORTS_PENDING:
            places = self._places.setdefault(backend, asyncio.Semaphore(_MAX_ABORTS_AT_ONCE))
            self._background.start(self._send(backend, attempt_id, headers, places))

    async def _send(
        self, backend: Backend, attempt_id: str, headers: Mapping[str, str], places: asyncio.Semaphore
    ) -> None:
        body = orjson.dumps({"rid": attempt_id})
        async with places:
            with suppress(UpstreamError):
                await self._upstream.fetch(
                    backend, "/abort_request", body, headers, answer_seconds=_ABORT_SECONDS, resend_if_stale=True
                )
