"""Clients that leave: every connector, both endpoints, streamed and not.

The engine's connection must close soon after the client has left, although the request would run for ever. The request
is not retried.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import pytest

from proxy.connectors import CONNECTORS
from proxy.settings import CONNECTOR_TRAITS
from proxy.sim.state import EngineState
from proxy.wire.openai import OPENAI_APIS, Api
from tests.asking import request, until
from tests.conformance.rows import all_of_one
from tests.conftest import Deploy
from tests.deployment import generations

_NOTICED_WITHIN_SECONDS = 1.0


def _is_asked(state: EngineState) -> bool:
    return state.live == 1


def _waits(state: EngineState) -> bool:
    return state.waiting_rooms == 1


def _has_generated(state: EngineState) -> bool:
    return state.tokens_generated >= 3


@dataclass(frozen=True)
class Phase:
    """The phase of a request when its client leaves. A fault keeps it there; `is_there` looks at the engine."""

    name: str
    role: str
    fault: str
    is_there: Callable[[EngineState], bool] = _is_asked
    fields: Mapping[str, Any] = field(default_factory=dict)
    tokens: int = 0
    """Number of tokens that have reached the client of a stream."""
    is_alone: bool = False
    """Whether the prefiller hangs, so that the decoder waits alone."""
    engine: Mapping[str, Any] = field(default_factory=dict)
    """Options of the engines."""

    def __str__(self) -> str:
        return self.name


PHASES = [
    Phase("prefill", "prefill", "hang_before_headers"),
    Phase("hand-over", "decode", "hang_before_headers"),
    Phase("fetching-kv", "decode", "slow_load", fields={"seconds": 3600.0}),
    Phase("first-token", "decode", "stall_after_tokens"),
    Phase("streaming", "decode", "", _has_generated, tokens=3),
    Phase("stalled", "decode", "stall_after_tokens", _has_generated, {"tokens": 3}, tokens=3),
]
MEETING = Phase("meeting", "decode", "", _waits, is_alone=True)
QUEUEING = Phase("queueing", "decode", "", _waits, engine={"metaserver_delay_seconds": 3600.0})


def phases(connector: str) -> list[Phase]:
    traits = CONNECTOR_TRAITS[connector]
    if not traits.takes_prefillers:
        return [phase for phase in PHASES if phase.role == "decode" and phase.name != "fetching-kv"]
    if traits.has_prefill_first:
        return PHASES
    return [*PHASES, MEETING, *([QUEUEING] if traits.needs_callback_port else [])]


def rows() -> Iterator[tuple[str, Phase, str, Api]]:
    """Yield connector, phase, shape and endpoint of each row."""
    for connector in CONNECTORS:
        yield from product([connector], phases(connector), ("stream", "whole"), OPENAI_APIS)


@pytest.mark.covering("connector phase shape api", rows(), all_of_one)
async def test_leaving_client_frees_the_engines(
    deploy: Deploy, connector: str, phase: Phase, shape: str, api: Api
) -> None:
    stream = shape == "stream"
    # Two of each role, so that a second attempt would be possible.
    gateway = await deploy(2, 2, engine={"decode_step_ms": 1.0, **phase.engine}, connector=connector)
    engine = gateway.engines[0] if phase.role == "prefill" else gateway.decoders[0]
    if phase.is_alone:
        gateway.prefillers[0].faults.add("hang_before_headers")
    if phase.fault:
        engine.faults.add(phase.fault, **phase.fields)

    async with gateway.asking(request(api, stream=stream, max_tokens=100_000)) as client:
        await engine.wait_until(phase.is_there)
        if stream:
            await client.has_tokens(phase.tokens)
        assert engine.state.disconnects == 0
        await client.leave()
        await engine.wait_until(lambda state: state.disconnects == 1, _NOTICED_WITHIN_SECONDS)

    await until(lambda: not gateway.worker.drain_manager.in_flight_count, "the end of the request")
    if phase.role == "prefill" and CONNECTOR_TRAITS[connector].has_prefill_first:
        assert not generations(*gateway.decoders)
    assert all(len(generations(*engines)) <= 1 for engines in (gateway.prefillers, gateway.decoders))
    if connector in ("mooncake_bootstrap", "nixl_push"):
        # After the prefill, the KV cache waits for a decoder, which fetches it if it had the request already.
        gateway.may_stay_pinned = 1
        gateway.expects_inexact_pins = True
    ((term,),) = gateway.metrics("pdproxy_request_end_total")
    assert term[0] == "C"
    if phase.role == "prefill" and CONNECTOR_TRAITS[connector].has_prefill_first:
        assert term == "CF"
    elif stream and phase.tokens:
        assert term == "CD"


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("waiting", ["prefill", "decode"])
async def test_engine_that_ignores_closed_connections_gets_an_abort(deploy: Deploy, waiting: str, stream: bool) -> None:
    """SGLang looks for closed connections only now and then, and would wait for its partner."""
    gateway = await deploy(connector="sglang_bootstrap")
    (prefiller,), (decoder,) = gateway.prefillers, gateway.decoders
    waits, hangs = (prefiller, decoder) if waiting == "prefill" else (decoder, prefiller)
    hangs.faults.add("hang_before_headers")
    waits.faults.add("ignore_leaving")
    async with gateway.asking(request(Api.CHAT, stream=stream)) as client:
        await waits.wait_until(_waits)
        await client.leave()
    await waits.wait_until(lambda state: state.waiting_rooms == 0)
    assert [seen.path for seen in waits.requests].count("/abort_request") == 1
