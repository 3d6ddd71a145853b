"""vLLM's MooncakeConnector. Both legs run at the same time, and engines match them by a transfer ID that pdproxy draws.

The decoder finds the prefiller's engine through the bootstrap server beside the prefiller, and the prefiller sends the
KV cache when it is computed. pdproxy asks the bootstrap server for its engines, one per data-parallel rank, because
both legs must name the same one. The prefiller's answer only says that the prefill is done.
"""

from __future__ import annotations

from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import orjson

from proxy.balancer.incompatibilities import IncompatibilityKind
from proxy.common.errors import UpstreamError
from proxy.common.terms import Stage
from proxy.connectors.base import (
    ConnectorContext,
    check_status,
    first_byte_timeout_seconds,
    new_attempt_id,
    parse_prefilled,
    prefill_timeout_seconds,
)
from proxy.connectors.bootstraps import BootstrapServers, bootstrap_address
from proxy.connectors.concurrent import run_prefill_beside
from proxy.connectors.disaggregated import DisaggregatedConnector, make_prefill_body
from proxy.connectors.handoff import KvHandoff
from proxy.connectors.legs import RANK_HEADER, Attempt, RankClaim
from proxy.connectors.releaser import KvTransfer, PrefilledKv

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from proxy.balancer.pick import PickRequest
    from proxy.common.backend import Backend
    from proxy.dialects.call import Call
    from proxy.observe.timeline import Timeline
    from proxy.upstream import Response


class MooncakeBootstrap(DisaggregatedConnector):
    """Runs the prefill leg beside the decode leg."""

    def __init__(self, context: ConnectorContext) -> None:
        super().__init__(context)
        self._pools = context.pools
        self._releaser = context.releaser
        self._bootstraps = BootstrapServers(
            context.client,
            report=lambda backend, hint: context.compatibility.set_finding(
                backend, IncompatibilityKind.BOOTSTRAP, hint
            ),
            engine_id=context.pools.prefill.engine_id_of,
            addresses=lambda: {
                backend: self._bootstrap_address(backend) for backend in self._pools.prefill.all_backends()
            },
        )

    @asynccontextmanager
    async def open_two_leg_attempt(
        self, call: Call, request: PickRequest, timeline: Timeline
    ) -> AsyncIterator[Attempt]:
        timeouts = self._context.live.settings.timeouts
        with (
            KvHandoff(self._context, call, request, timeline) as handoff,
            self._ranks.start_claim() as prefill_rank,
            self._ranks.start_claim() as decode_rank,
        ):
            prefiller, decoder = handoff.prefiller.backend, handoff.decoder.backend
            timeline.prefiller, timeline.decoder = prefiller.name, decoder.name
            timeline.enter_stage(Stage.PREFILL)
            meeting = await self._choose_engine(prefiller, prefill_rank)
            timeline.prefill_id = timeline.decode_id = meeting.attempt_id
            handoff.prefilled_kv = _orphaned_kv(call, prefiller, meeting)
            handoff.on_arrived = lambda: self._bootstraps.mark_reachable(prefiller)
            # The status of a streamed answer arrives at once, but nothing more before the end of the prefill.
            answer_seconds = prefill_timeout_seconds(timeouts, call) + first_byte_timeout_seconds(timeouts, call)
            with self._bootstraps.forget_on_failure(prefiller):
                async with run_prefill_beside(
                    self._run_prefill_leg(call, meeting, prefill_rank, handoff, timeline)
                ) as leg:
                    opening = self._send_decode_leg(call, decoder, meeting, decode_rank, answer_seconds)
                    with await leg.await_first_result(opening, lambda: handoff.is_settled) as response:
                        await check_status(response)
                        yield Attempt(
                            response,
                            timeline,
                            prefiller=prefiller,
                            has_kv_from_prefiller=True,
                            handoff=handoff,
                            first_token_seconds=answer_seconds,
                        )

    def _bootstrap_address(self, prefiller: Backend) -> str:
        return bootstrap_address(prefiller, self._context.live.settings.mooncake.bootstrap_port)

    async def _choose_engine(self, prefiller: Backend, rank: RankClaim) -> KvMeetingPoint:
        """Choose the engine behind a prefiller's address. Raises UpstreamError."""
        address = self._bootstrap_address(prefiller)
        engines = await self._bootstraps.query_engines(prefiller, address)
        return KvMeetingPoint(new_attempt_id(), address, *engines[rank.claim_rank(prefiller, len(engines))])

    async def _send_decode_leg(
        self, call: Call, decoder: Backend, meeting: KvMeetingPoint, rank: RankClaim, answer_seconds: float
    ) -> Response:
        """Open the decode leg. Raises UpstreamError."""
        steering = rank.rank_header(decoder, self._context.live.settings.balance.decode_dp_ranks)
        return await self._upstream.post_and_await_head(
            decoder,
            call.api.path,
            call.make_body({"kv_transfer_params": {**meeting.decode_params, **call.kv_params}}),
            {**call.headers, "x-request-id": meeting.attempt_id, **steering},
            answer_seconds=answer_seconds,
        )

    async def _run_prefill_leg(
        self, call: Call, meeting: KvMeetingPoint, rank: RankClaim, handoff: KvHandoff, timeline: Timeline
    ) -> None:
        """Run the prefill leg. Raises UpstreamError if the decoder would get no KV."""
        prefiller = handoff.prefiller.backend
        try:
            response, body = await self._upstream.post_and_read_body(
                prefiller,
                call.api.path,
                make_prefill_body(call, self._pools.prefill, prefiller, meeting.prefill_params),
                {**call.headers, "x-request-id": meeting.attempt_id, RANK_HEADER: str(meeting.rank)},
                answer_seconds=prefill_timeout_seconds(self._context.live.settings.timeouts, call),
            )
            answer = parse_prefilled(response, body)
        except UpstreamError as error:
            if handoff.is_settled:  # the decoder is at work and no longer needs the prefiller
                return
            self._releaser.add_possible_orphan(prefiller, call.prompt_tokens, error)
            raise
        prompt_counts = timeline.usage.add_prompt_usage(answer.read_usage)
        rank.release_ranks()
        handoff.record_prefill(*prompt_counts)
        handoff.record_kv_held()
        if not handoff.is_settled:
            timeline.enter_stage(Stage.FIRST_TOKEN if call.stream else Stage.STREAM)


@dataclass(frozen=True, slots=True)
class KvMeetingPoint:
    """The members by which the two engines of an attempt find each other (vLLM's mooncake_connector_proxy.py)."""

    attempt_id: str
    address: str
    """The address of the prefiller's bootstrap server."""
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


def _orphaned_kv(call: Call, prefiller: Backend, meeting: KvMeetingPoint) -> PrefilledKv:
    """Return the KV that the prefiller keeps for the decoder after it has answered."""
    return PrefilledKv(
        prefiller,
        orjson.dumps(meeting.decode_params),
        KvTransfer.OTHER,
        call.prompt_tokens,
        call.headers,
        survives_rejected_decode=True,  # a decoder that cannot load KV gives up like this
    )
