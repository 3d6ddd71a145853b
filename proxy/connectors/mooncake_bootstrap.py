"""vLLM's own MooncakeConnector: both legs at once, and the engines meet by a transfer id of ours.

The decoder finds the prefiller's engine through the bootstrap server that runs beside it, and the prefiller sends the
KV cache when it has it. Which engines there are the bootstrap server tells us, too: each data-parallel rank is one, and
both legs have to speak of the same. The prefiller's answer says nothing but that it is done.
"""

from __future__ import annotations

from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import orjson

from proxy.balancer.handovers import LEAST_TOKENS
from proxy.balancer.misfits import MisfitKind
from proxy.connectors.base import (
    Attempt,
    check_status,
    first_byte_seconds,
    new_attempt_id,
    parse_prefilled,
    prefill_seconds,
)
from proxy.connectors.bootstraps import Bootstraps, bootstrap_address
from proxy.connectors.concurrent import running
from proxy.connectors.custody import PrefilledKv
from proxy.connectors.disaggregated import Disaggregated
from proxy.connectors.kv_transfer import kv_transfer
from proxy.connectors.prefill_body import prefill_body
from proxy.connectors.ranks import RANK_HEADER
from proxy.errors import Failure, UpstreamError
from proxy.terms import Stage

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from types import TracebackType

    from proxy.backend import Backend
    from proxy.balancer.lease import Lease
    from proxy.balancer.pick import PickRequest
    from proxy.call import Call
    from proxy.connectors.base import ConnectorContext
    from proxy.connectors.custody import Custody
    from proxy.connectors.ranks import RankClaim
    from proxy.connectors.releaser import Releaser
    from proxy.observe.timeline import Journey
    from proxy.upstream import Response


class MooncakeBootstrap(Disaggregated):
    """Prefill beside decode."""

    # The decoder is any vLLM: it tells token ids, and both engines take `prompt_token_ids` among the parameters, which
    # vLLM reads before the KV connector sees them (renderers/online_renderer.py).
    continues_answers = True

    def __init__(self, context: ConnectorContext) -> None:
        super().__init__(context)
        self._pools = context.pools
        self._releaser = context.releaser
        self._fitness = context.fitness
        self._bootstraps = Bootstraps(
            context.session,
            report=lambda backend, hint: context.fitness.report(backend, MisfitKind.BOOTSTRAP, hint),
            engine_id=context.pools.prefill.engine_id,
            addresses=lambda: {backend: self._address(backend) for backend in self._pools.prefill.backends()},
        )

    @asynccontextmanager
    async def open_both(self, call: Call, request: PickRequest, journey: Journey) -> AsyncIterator[Attempt]:
        """See Disaggregated."""
        timeouts = self._context.settings.timeouts
        with (
            self._pools.decode.lease(request) as decoder,
            self._pools.prefiller_for(decoder.backend, request) as prefiller,
            self._ranks.claim() as prefill_rank,
            self._ranks.claim() as decode_rank,
        ):
            journey.begin_attempt()
            journey.prefiller, journey.decoder = prefiller.backend.name, decoder.backend.name
            journey.enter(Stage.PREFILL)
            meeting = await self._arrange(prefiller.backend, prefill_rank)
            journey.prefill_id = journey.decode_id = meeting.attempt_id
            custody = self._releaser.custody(_kept_kv(call, prefiller.backend, meeting), request.avoid)
            # Of a streamed answer the status comes at once, and nothing more before the prefill has ended.
            answer_seconds = prefill_seconds(timeouts, call) + first_byte_seconds(timeouts, call)
            with (
                _HandOver(prefiller, decoder, prefill_rank, self._releaser, custody) as handover,
                self._bootstraps.doubting(prefiller.backend),
            ):
                async with running(self._prefill(call, meeting, handover, journey)) as leg:
                    opening = self._decode(call, decoder.backend, meeting, decode_rank, answer_seconds)
                    with await leg.race(opening, lambda: handover.is_settled) as response:
                        await check_status(response)

                        def on_arrival(works: bool) -> None:
                            handover.settle(works)
                            if works and journey.kv == "-":
                                self._bootstraps.met(prefiller.backend)
                                pair = prefiller.backend, decoder.backend
                                journey.kv = self._fitness.handed_over(*pair, call.prompt_tokens, LEAST_TOKENS)

                        yield Attempt(
                            response,
                            journey,
                            prefiller=prefiller.backend,
                            kv_handed_over=True,
                            on_arrival=on_arrival,
                            first_token_seconds=answer_seconds,
                        )

    def _address(self, prefiller: Backend) -> str:
        return bootstrap_address(prefiller, self._context.settings.mooncake.bootstrap_port)

    async def _arrange(self, prefiller: Backend, rank: RankClaim) -> Meeting:
        """Choose the engine behind a prefiller's address. Raises UpstreamError."""
        address = self._address(prefiller)
        engines = await self._bootstraps.engines(prefiller, address)
        return Meeting(new_attempt_id(), address, *engines[rank.on(prefiller, len(engines))])

    async def _decode(
        self, call: Call, decoder: Backend, meeting: Meeting, rank: RankClaim, answer_seconds: float
    ) -> Response:
        """Open the decode leg. Raises UpstreamError."""
        steering = rank.header(decoder, self._context.settings.balance.decode_dp_ranks)
        return await self._upstream.open(
            decoder,
            call.api.path,
            call.body({"kv_transfer_params": {**meeting.decode_params, **call.kv_params}}),
            {**call.headers, "x-request-id": meeting.attempt_id, **steering},
            answer_seconds=answer_seconds,
        )

    async def _prefill(self, call: Call, meeting: Meeting, handover: _HandOver, journey: Journey) -> None:
        """The prefill leg. Raises UpstreamError if the decoder may wait in vain."""
        prefiller = handover.prefiller.backend
        try:
            response, body = await self._upstream.fetch(
                prefiller,
                call.api.path,
                prefill_body(call, self._pools.prefill.engine_version(prefiller), meeting.prefill_params),
                {**call.headers, "x-request-id": meeting.attempt_id, RANK_HEADER: str(meeting.rank)},
                answer_seconds=prefill_seconds(self._context.settings.timeouts, call),
            )
            answer = parse_prefilled(response, body)
        except UpstreamError as error:
            if handover.is_settled:  # the decoder is at work, and needs nobody for it
                return
            self._releaser.suspect(prefiller, call.prompt_tokens, error)
            raise
        journey.usage.saw_prompt(answer.values.get("usage"))
        handover.prefilled()
        if not handover.is_settled:
            journey.enter(Stage.FIRST_TOKEN if call.stream else Stage.STREAM)


class _HandOver:
    """The KV cache of one attempt, on its way from prefiller to decoder: `with` it, around both legs."""

    def __init__(self, prefiller: Lease, decoder: Lease, rank: RankClaim, releaser: Releaser, custody: Custody) -> None:
        self.prefiller = prefiller
        self.is_settled = False
        """The decoder has said something: that it has the KV, or that it gave up."""
        self._decoder = decoder
        self._rank = rank
        self._releaser = releaser
        self._custody = custody
        self._is_kept = False

    def prefilled(self) -> None:
        """The prefiller has answered: it has done its work, and keeps the KV until the decoder has it."""
        self._is_kept = True
        self._rank.free()
        self.prefiller.free_compute()

    def settle(self, works: bool) -> None:
        """See Attempt.on_arrival. What a decoder gave up it has not fetched: engines that cannot load KV end so."""
        if works:
            self._custody.end(self._decoder.backend, True)
            self._decoder.confirm()
        elif not self.is_settled:
            self._releaser.handed_over(self.prefiller.backend, self._decoder.backend, False)
        self.is_settled = True
        self.prefiller.free_kv()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        is_nowhere = isinstance(error, UpstreamError) and error.failure is Failure.BOOTSTRAP
        # A prefill that is broken off keeps nothing, and what a decoder has looked for elsewhere until it gave up has
        # been kept for as long.
        if self._is_kept and not is_nowhere:
            self._custody.__exit__(kind, error, trace)


@dataclass(frozen=True, slots=True)
class Meeting:
    """By what the two engines of one attempt find each other: the members of vLLM's mooncake_connector_proxy.py."""

    attempt_id: str
    address: str
    """Of the prefiller's bootstrap server."""
    rank: int
    engine_id: str

    @property
    def prefill_params(self) -> dict[str, object]:
        return {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": f"xfer-{self.attempt_id}"}

    @property
    def decode_params(self) -> dict[str, object]:
        return {
            "do_remote_decode": False,
            "do_remote_prefill": True,
            "remote_bootstrap_addr": self.address,
            "remote_engine_id": self.engine_id,
            "transfer_id": f"xfer-{self.attempt_id}",
        }


def _kept_kv(call: Call, prefiller: Backend, meeting: Meeting) -> PrefilledKv:
    """What the prefiller keeps for the decoder once it has answered."""
    params = meeting.decode_params
    return PrefilledKv(prefiller, orjson.dumps(params), kv_transfer(params), call.prompt_tokens, call.headers)
