"""SGLang's protocol: prefiller and decoder get the same request at the same time, and meet in a bootstrap room.

Both bodies are the client's with four members more: where the prefiller's bootstrap server is, the room's number and
the request's id. SGLang's prefiller limits itself to one token, so no sampling parameter is changed, and its answer
comes when the decoder has the KV cache (`process_disagg_prefill_inflight_queue`). An engine whose partner fails would
wait for it for minutes: it is told to abort the request.
"""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final
from weakref import WeakValueDictionary

import orjson

from proxy.balancer.backend import Role
from proxy.balancer.health import is_to_blame
from proxy.connectors.base import (
    Attempt,
    check_status,
    first_byte_seconds,
    new_attempt_id,
    prefill_seconds,
    refusal,
)
from proxy.connectors.beside import running
from proxy.connectors.ranks import Ranks
from proxy.errors import BadRequest, Failure, UpstreamError
from proxy.record import Journey, Stage
from proxy.wire.sglang_errors import ERROR_HEADERS, error_in_answer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Collection, Mapping, Sequence

    from aiohttp import web

    from proxy.balancer.backend import Backend
    from proxy.balancer.lease import Lease
    from proxy.call import Call
    from proxy.connectors.base import Kit
    from proxy.connectors.beside import PrefillLeg
    from proxy.connectors.ranks import RankClaim
    from proxy.settings import Settings
    from proxy.upstream import Response, Upstream

# A signed 64-bit number in the engines. Room 0 is that of their health checks.
_ROOMS: Final = 1 << 63

_ABORT_SECONDS: Final = 2.0
_MAX_ABORTS_AT_ONCE: Final = 8
_MAX_ABORTS_PENDING: Final = 1024


class SglangBootstrap:
    """Prefill and decode leg side by side."""

    roles: tuple[Role, ...] = (Role.PREFILL, Role.DECODE)
    # The engine gives all samples of a request the same room (`_handle_batch_request` in tokenizer_manager.py).
    one_sequence_per_call = True
    continues_answers = False

    def __init__(self, kit: Kit) -> None:
        self._pools = kit.pools
        self._upstream = kit.upstream
        self._timeouts = kit.settings.timeouts
        self._pair_told = kit.releaser.handed_over
        self._dp_size = kit.settings.sglang.dp_size
        self._ranks = Ranks()
        self._aborts = _Aborts(kit.upstream)

    def check(self, call: Call) -> None:
        """Refuse what only the prefiller knows and OpenAI's answers have no place for."""
        if call.values.get("echo") and call.values.get("logprobs") is not None:
            raise BadRequest("echo with logprobs is not supported with prefill/decode disaggregation", param="echo")

    def configure(self, settings: Settings) -> None:
        """Take changed settings for what is opened from now on."""
        self._timeouts = settings.timeouts
        self._dp_size = settings.sglang.dp_size

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
            self._pools.prefiller_for(decoder.backend, call, avoid, prefer) as prefiller,
            self._ranks.claim() as claim,
        ):
            journey.begin_attempt()
            journey.prefiller, journey.decoder = prefiller.backend.name, decoder.backend.name
            journey.enter(Stage.PREFILL)
            legs = _Legs(call, prefiller, decoder, claim, journey, self._dp_size)
            try:
                async with running(self._prefill(legs)) as prefill_leg:
                    with await prefill_leg.race(self._decode(legs)) as response:
                        await check_status(response)
                        legs.decoder_answers()

                        def on_arrival(works: bool) -> None:
                            self._settle(legs, works)

                        # The decoder knows from the prefiller how much of the prompt was cached
                        # (`_commit_transfer_to_req`), so what it tells is not corrected.
                        yield SglangAttempt(
                            response,
                            journey,
                            prefiller=prefiller.backend,
                            kv_handed_over=False,
                            on_arrival=on_arrival,
                            first_token_seconds=self._decode_seconds(call),
                            prefill_answer=PrefillAnswer(legs, prefill_leg),
                        )
            except BaseException as error:
                if isinstance(error, UpstreamError):
                    legs.failed(error)
                    if is_to_blame(error) and error.failure is not Failure.CONNECT:
                        self._settle(legs, False)
                for backend in legs.at_work:
                    self._aborts.send(backend, legs.id, call.headers)
                raise

    async def _prefill(self, legs: _Legs) -> None:
        """Read the prefiller's answer to the end: there is nothing in it for the client, unless it failed."""
        call, backend = legs.call, legs.prefiller.backend
        response, answer = await self._upstream.fetch(
            *(backend, call.api.path, legs.body, legs.headers),
            silence_seconds=prefill_seconds(self._timeouts, call),
        )
        if response.status != 200:
            raise refusal(response, answer)
        if (told := error_in_answer(answer)) is not None:
            raise response.refuse("reported an error in its answer", told.status, told.body, ERROR_HEADERS)
        legs.prefilled(answer)

    async def _decode(self, legs: _Legs) -> Response:
        """Open the decode leg. Its status line comes with the first token, or before, from engines that hurry."""
        call = legs.call
        return await self._upstream.open(
            *(legs.decoder.backend, call.api.path, legs.body, legs.headers),
            silence_seconds=self._decode_seconds(call),
        )

    def _decode_seconds(self, call: Call) -> float:
        """How long a decoder may take to begin its answer: it waits for the prefill first."""
        return prefill_seconds(self._timeouts, call) + first_byte_seconds(self._timeouts, call)

    def _settle(self, legs: _Legs, works: bool) -> None:
        """The KV cache has arrived, or never will. May be called again."""
        legs.prefiller.free_kv()
        if not legs.is_settled:
            legs.is_settled = True
            self._pair_told(legs.prefiller.backend, legs.decoder.backend, works)
            if works:
                legs.decoder.confirm()


class _Legs:
    """The two legs of one attempt: what is sent, and who works on it."""

    def __init__(
        self, call: Call, prefiller: Lease, decoder: Lease, claim: RankClaim, journey: Journey, dp_size: int
    ) -> None:
        self.call = call
        self.prefiller = prefiller
        self.decoder = decoder
        self.id = new_attempt_id()
        rank = claim.on(prefiller.backend, dp_size)
        self.body = call.body(bootstrap(prefiller.backend, self.id, rank, dp_size))
        self.headers = {**call.headers, "x-request-id": self.id}
        self.at_work = {prefiller.backend, decoder.backend}
        """Engines that may have the request and have not ended it."""
        self.is_settled = False
        self.answer: bytes | None = None
        """The prefiller's; None until it has come."""
        self._claim = claim
        self._journey = journey
        self._decoder_answers = False

    def prefilled(self, answer: bytes) -> None:
        """The prefiller has answered: the decoder has the KV cache."""
        self.answer = answer
        self.at_work.discard(self.prefiller.backend)
        self.prefiller.free_compute()
        self._claim.free()
        if self._journey.stage is Stage.PREFILL:
            self._enter_next()

    def decoder_answers(self) -> None:
        """The decoder's status line has come. Some engines send it when they have nothing to tell yet."""
        self._decoder_answers = True
        if self._journey.stage is Stage.HANDOFF:
            self._enter_next()

    def failed(self, error: UpstreamError) -> None:
        """An engine that refused, or was never reached, does not work on it."""
        if error.failure in (Failure.CONNECT, Failure.STATUS):
            self.at_work.discard(error.backend)

    def _enter_next(self) -> None:
        if not self.call.stream:
            self._journey.enter(Stage.STREAM)
        else:
            self._journey.enter(Stage.FIRST_TOKEN if self._decoder_answers else Stage.HANDOFF)


class PrefillAnswer:
    """What the prefiller answers, which may be later than the decoder's first words."""

    def __init__(self, legs: _Legs, leg: PrefillLeg) -> None:
        self._legs = legs
        self._leg = leg

    @property
    def so_far(self) -> bytes | None:
        """The whole of it; None until it has come."""
        return self._legs.answer

    async def whole(self) -> bytes:
        """Wait for it. Raises UpstreamError."""
        await self._leg.ended()
        assert self._legs.answer is not None
        return self._legs.answer


@dataclass(frozen=True, slots=True, kw_only=True)
class SglangAttempt(Attempt):
    """An attempt of which the prefiller has something to tell, too."""

    prefill_answer: PrefillAnswer


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


def room(drawn: int, rank: int, dp_size: int) -> int:
    """A room in [1, 2**63) of a data-parallel rank: prefillers take `room % dp_size` (`follow_bootstrap_room`)."""
    return (1 + drawn % (_ROOMS // dp_size - 1)) * dp_size + rank


class _Aborts:
    """Tells engines to stop working on requests that nobody waits for, beside whatever else goes on.

    An engine notices a closed connection only after some seconds, and its partner's end after minutes. Nothing depends
    on it, so what fails is not repeated, and what is too much is left out.
    """

    def __init__(self, upstream: Upstream) -> None:
        self._upstream = upstream
        self._places: WeakValueDictionary[Backend, asyncio.Semaphore] = WeakValueDictionary()
        self._tasks: set[asyncio.Task[None]] = set()

    def send(self, backend: Backend, attempt_id: str, headers: Mapping[str, str]) -> None:
        """Have an engine abort this attempt. `headers`: the client's credential may be the engine's."""
        if len(self._tasks) < _MAX_ABORTS_PENDING:
            places = self._places.setdefault(backend, asyncio.Semaphore(_MAX_ABORTS_AT_ONCE))
            task = asyncio.get_running_loop().create_task(self._send(backend, attempt_id, headers, places))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _send(
        self, backend: Backend, attempt_id: str, headers: Mapping[str, str], places: asyncio.Semaphore
    ) -> None:
        body = orjson.dumps({"rid": attempt_id})
        async with places:
            with suppress(UpstreamError):
                await self._upstream.fetch(
                    backend, "/abort_request", body, headers, silence_seconds=_ABORT_SECONDS, resend_if_stale=True
                )
