"""Encoders in front of the program as an operator runs it, with several workers."""

from __future__ import annotations

from typing import Any

from proxy.sim.engine import SimulatedEngine
from proxy.wire.openai import Api
from tests.asking import answer_alone, ask, request
from tests.deployment import generations
from tests.scenarios.conftest import Site
from tests.scenarios.program import gateway
from tests.scenarios.test_stopping import is_ready

IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}


async def test_media_is_encoded_whichever_worker_gets_it(site: Site) -> None:
    body: dict[str, Any] = {
        **request(Api.CHAT, max_tokens=3),
        "messages": [{"role": "user", "content": [IMAGE, {"type": "text", "text": "what is this?"}]}],
    }
    async with SimulatedEngine() as encoder:
        engines = ("--encode", encoder.url, *site.engines)
        async with gateway(*engines, "--workers", "2") as program:
            await is_ready(site.session, program.url)
            for _ in range(6):
                answer = await ask(site.session, program.url, body, connection="close")
                assert answer.text == await answer_alone(body)
            assert (await ask(site.session, program.url, request(Api.CHAT))).is_done
            assert len(generations(encoder)) == 6
            assert len(generations(site.prefiller)) == 7
            name = f"{encoder.host}:{encoder.port}"
            await program.counts(f'pdproxy_instance_requests_total{{address="{name}",result="ok",role="encode"}} 6.0')
