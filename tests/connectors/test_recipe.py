"""A connector as docs/contributing/recipes.md says: one class and its traits, and everything else is done around it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import orjson
import pytest

from proxy.balancer.pick import PickRequest
from proxy.common.errors import Failure, UpstreamError
from proxy.common.terms import Stage
from proxy.connectors import CONNECTORS
from proxy.connectors.base import (
    Connector,
    check_status,
    first_byte_timeout_seconds,
    new_attempt_id,
    parse_prefilled,
    prefill_timeout_seconds,
)
from proxy.connectors.disaggregated import make_prefill_body
from proxy.connectors.handoff import KvHandoff
from proxy.connectors.legs import Attempt
from proxy.connectors.releaser import PrefilledKv, parse_kv_params
from proxy.dialects.call import Call
from proxy.observe.timeline import Timeline
from proxy.settings import CONNECTOR_TRAITS, ConnectorTraits
from proxy.wire.openai import OPENAI_APIS, Api
from tests.asking import answer_alone, request, until
from tests.conftest import Deploy
from tests.deployment import generations


class Example(Connector):
    """The pull protocol, written as in the recipe: prefill, then decode with the KV parameters of the answer."""

    @asynccontextmanager
    async def open_attempt(self, call: Call, request: PickRequest, timeline: Timeline) -> AsyncIterator[Attempt]:
        """See Connector.open_attempt."""
        pools, upstream, timeouts = self._context.pools, self._context.upstream, self._context.live.settings.timeouts
        headers = {**call.headers, "x-request-id": new_attempt_id()}
        with KvHandoff(self._context, call, request, timeline) as handoff:
            prefiller, decoder = handoff.prefiller.backend, handoff.decoder.backend
            timeline.prefiller, timeline.decoder = prefiller.name, decoder.name
            timeline.enter_stage(Stage.PREFILL)
            try:
                response, body = await upstream.post_and_read_body(
                    prefiller,
                    call.api.path,
                    make_prefill_body(call, pools.prefill, prefiller, {"do_remote_decode": True}),
                    headers,
                    answer_seconds=prefill_timeout_seconds(timeouts, call),
                )
                told = bytes(parse_prefilled(response, body).kv_transfer_params)
            except UpstreamError as error:
                self._context.releaser.add_possible_orphan(prefiller, call.prompt_tokens, error)
                raise
            params = orjson.loads(told)
            if not isinstance(params, dict):
                raise response.make_failure(Failure.MISSING_KV, "the answer has no KV parameters for a decoder")
            handoff.prefiller.release_compute()
            handoff.prefilled_kv = PrefilledKv(
                prefiller, told, parse_kv_params(told).transfer_protocol, call.prompt_tokens, call.headers
            )
            handoff.record_kv_held()
            timeline.enter_stage(Stage.HANDOFF)
            with await upstream.post_and_await_head(
                decoder,
                call.api.path,
                call.make_body({"kv_transfer_params": {**params, **call.kv_params}}),
                headers,
                answer_seconds=first_byte_timeout_seconds(timeouts, call),
            ) as response:
                await check_status(response)
                yield Attempt(response, timeline, prefiller=prefiller, has_kv_from_prefiller=True, handoff=handoff)


@pytest.fixture(autouse=True)
def table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CONNECTORS, "example", Example)
    monkeypatch.setitem(CONNECTOR_TRAITS, "example", ConnectorTraits(has_prefill_first=True))


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("api", OPENAI_APIS)
async def test_answer_is_what_one_engine_alone_would_say(deploy: Deploy, api: Api, stream: bool) -> None:
    gateway = await deploy(connector="example")
    body = request(api, stream=stream)
    answer = await gateway.ask(body)
    assert answer.is_done
    assert answer.text == await answer_alone(body)
    assert gateway.decoders[0].state.local_prefills == 0


async def test_several_samples_are_several_attempts(deploy: Deploy) -> None:
    gateway = await deploy(connector="example")
    answer = await gateway.ask(request(Api.CHAT, n=3))
    assert set(answer.texts) == {0, 1, 2}
    assert len(generations(gateway.prefillers[0])) == 3


async def test_interrupted_answer_continues_on_another_decoder(deploy: Deploy) -> None:
    gateway = await deploy(1, 2, connector="example")
    body = request(Api.CHAT, stream=True, max_tokens=20)
    gateway.decoders[0].faults.add("reset_after_tokens", tokens=3, times=1)
    answer = await gateway.ask(body)
    assert answer.is_done
    assert answer.text == await answer_alone(body)


async def test_client_that_leaves_leaves_an_orphan_that_is_released(deploy: Deploy) -> None:
    gateway = await deploy(1, 2, connector="example")
    decoder = gateway.decoders[0]
    decoder.faults.add("hang_before_headers", times=1)
    async with gateway.asking(request(Api.CHAT, stream=True)) as client:
        await decoder.wait_until(lambda state: state.live == 1)
        await client.leave()
    await until(lambda: gateway.decoders[1].state.releases == 1, "the release")
    assert gateway.metrics("pdproxy_kv_orphans_total") == {(): 1.0}


async def test_pair_whose_hand_overs_fail_is_kept_apart(deploy: Deploy) -> None:
    gateway = await deploy(1, 2, connector="example", health={"quarantine_after": 1})
    gateway.decoders[0].faults.add("refuse_status", status=500, times=1)
    assert (await gateway.ask(request(Api.CHAT))).is_done
    assert gateway.metrics("pdproxy_pair_quarantines_total") == {(): 1.0}
