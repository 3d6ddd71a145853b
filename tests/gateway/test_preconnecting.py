"""A connection to the decoder is opened while the prompt is computed, with both readers."""

from __future__ import annotations

from typing import Any, Final

import pytest

from proxy.wire.openai import Api
from tests.asking import request, until
from tests.deployment import generations
from tests.gateway.roads import Roads
from tests.talking import Clients, raw

BODY: Final[dict[str, Any]] = request(Api.CHAT, "is computed", stream=True, max_tokens=2)


@pytest.mark.parametrize("is_taken", [True, False])
async def test_decoder_is_connected_before_its_request(roads: Roads, is_taken: bool) -> None:
    async def talk(clients: Clients) -> None:
        gateway = clients.gateway
        upstream, (backend,) = gateway.worker.upstream, gateway.worker.pools.decode.all_backends()
        gateway.prefillers[0].faults.add("slow_headers", times=1, seconds=0.2 if is_taken else 60)
        line = await clients.connect()
        line.send(raw(BODY, X_Request_Id="r-1"))
        await until(lambda: upstream._idle.get(backend.key), "a connection to the decoder")
        assert not generations(*gateway.decoders)
        if is_taken:
            await line.answer()
        else:
            line.leave()

    await roads.take(talk, is_fast=1, settings={})
