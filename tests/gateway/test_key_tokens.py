"""The tokens of client keys: what requests reserve and use, over real sockets."""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable
from dataclasses import replace

import aiohttp
import pytest

from proxy.settings import ClientKey
from proxy.wire.openai import Api
from tests.asking import request, until
from tests.deployment import Deployment

Deploy = Callable[..., Awaitable[Deployment]]


def give_keys(gateway: Deployment, **limits: dict[str, int]) -> None:
    """Replace the client keys. The key of each name is `sk-` and the name."""
    keys = tuple(
        ClientKey.model_validate(
            {"name": name, "key_sha256": hashlib.sha256(f"sk-{name}".encode()).hexdigest(), **members}
        )
        for name, members in limits.items()
    )
    slots = {key.name: slot for slot, key in enumerate(keys)}
    gateway.worker.apply_snapshot(replace(gateway.worker.current_snapshot, client_keys=keys, slots_by_key=slots))


@pytest.mark.parametrize("fast_path", [True, False])
async def test_key_is_rejected_when_its_tokens_are_used(deploy: Deploy, fast_path: bool) -> None:
    gateway = await deploy(listen={"fast_path": fast_path})
    give_keys(gateway, a={"tokens_per_minute": 10}, b={"tokens_per_minute": 10})
    served = await gateway.ask(request(Api.CHAT), Authorization="Bearer sk-a")
    assert served.usage["total_tokens"] >= 10
    refused = await gateway.ask(request(Api.CHAT), Authorization="Bearer sk-a")
    assert (refused.status, refused.error["code"], refused.error["type"]) == (429, "key_tokens", "rate_limit_error")
    assert refused.error["message"] == "this key may use 10 tokens per minute"
    assert int(refused.headers["retry-after"]) > 0
    assert (await gateway.ask(request(Api.CHAT), Authorization="Bearer sk-b")).status == 200
    assert gateway.metrics("pdproxy_rejected_total") == {("key_tokens",): 1}


async def test_tokens_of_an_answer_count_when_it_ends(deploy: Deploy) -> None:
    """Without a limit on the answer, a request reserves its prompt only."""
    gateway = await deploy()
    give_keys(gateway, a={}, b={})
    body = {name: value for name, value in request(Api.CHAT).items() if name != "max_tokens"}
    used = (await gateway.ask(body, Authorization="Bearer sk-b")).usage["total_tokens"]
    give_keys(gateway, a={"tokens_per_minute": used + 1})
    statuses = [(await gateway.ask(body, Authorization="Bearer sk-a")).status for _ in range(3)]
    assert statuses == [200, 200, 429]


async def test_prompt_of_several_samples_counts_once(deploy: Deploy) -> None:
    gateway = await deploy()
    give_keys(gateway, a={}, b={})
    body = request(Api.CHAT, "word " * 50, n=3)
    used = (await gateway.ask(body, Authorization="Bearer sk-b")).usage["total_tokens"]
    give_keys(gateway, a={"tokens_per_minute": used + 1})
    statuses = [(await gateway.ask(body, Authorization="Bearer sk-a")).status for _ in range(3)]
    assert statuses == [200, 200, 429]


async def test_tokens_that_a_leaving_client_did_not_get_are_returned(deploy: Deploy) -> None:
    gateway = await deploy(decoder={"decode_step_ms": 10})
    give_keys(gateway, a={"tokens_per_minute": 500})
    body = request(Api.CHAT, max_tokens=5000, stream=True)
    headers = {"Authorization": "Bearer sk-a"}
    url = gateway.url + Api.CHAT.path
    async with aiohttp.ClientSession() as session, session.post(url, json=body, headers=headers) as response:
        await response.content.readuntil(b'"content":')
        assert (await gateway.ask(body, **headers)).status == 429
    await until(lambda: gateway.worker.drain_manager.in_flight_count == 0, "the end of the request")
    assert (await gateway.ask(request(Api.CHAT), **headers)).status == 200
