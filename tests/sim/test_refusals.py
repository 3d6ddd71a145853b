"""What engines refuse, with the statuses and bodies of vLLM."""

from __future__ import annotations

from typing import Any

import pytest

from proxy.sim.engine import SimulatedEngine
from tests.sim.conftest import Client

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
HELLO: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 3}


@pytest.mark.parametrize(
    ("path", "body", "status", "kind", "message"),
    [
        (CHAT, HELLO | {"model": "nope"}, 404, "NotFoundError", "The model `nope` does not exist. Valid aliases: sim."),
        (CHAT, HELLO | {"max_tokens": 0}, 400, "BadRequestError", "max_tokens must be at least 1, got 0."),
        (CHAT, HELLO | {"min_tokens": 9}, 400, "BadRequestError", "less than or equal to max_tokens=3, got 9."),
        (CHAT, HELLO | {"stream_options": {}, "stream": False, "max_tokens": "x"}, 400, "Bad Request", "valid integer"),
        (CHAT, HELLO | {"stream_options": {"include_usage": True}}, 400, "Bad Request", "Stream options can only"),
        (CHAT, {"max_tokens": 3}, 400, "Bad Request", "Field required"),
        (CHAT, {"messages": "hi"}, 400, "Bad Request", "valid list"),
        (CHAT, [1], 400, "Bad Request", "valid dictionary"),
        (TEXT, {"prompt": ""}, 400, "Bad Request", "Either prompt or prompt_embeds must be provided"),
        (TEXT, {"prompt": [1] * 500}, 400, "BadRequestError", "maximum context length is 400 tokens"),
        (TEXT, {"prompt": {"a": 1}}, 400, "Bad Request", "valid string or list"),
    ],
)
async def test_bad_requests_are_refused(
    client: Client, path: str, body: Any, status: int, kind: str, message: str
) -> None:
    async with SimulatedEngine(max_model_len=400) as engine:
        answered, error = await client.post(engine, path, body)
    assert answered == status
    assert error["error"]["code"] == status
    assert error["error"]["type"] == kind
    assert message in error["error"]["message"]


async def test_body_that_is_not_json_is_refused(client: Client, engine: SimulatedEngine) -> None:
    async with client.session.post(engine.url + CHAT, data=b'{"messages": [') as response:
        assert response.status == 400


async def test_another_data_parallel_rank_is_refused(client: Client, engine: SimulatedEngine) -> None:
    status, error = await client.post(engine, CHAT, HELLO, X_data_parallel_rank="7")
    assert status == 400
    assert "data_parallel_rank 7 is out of range [0, 1)" in error["error"]["message"]
    status, _ = await client.post(engine, CHAT, HELLO, X_data_parallel_rank="0")
    assert status == 200


async def test_api_key_guards_v1_only(client: Client) -> None:
    async with SimulatedEngine(api_key="secret") as engine:
        status, body = await client.post(engine, CHAT, HELLO)
        assert (status, body) == (401, {"error": "Unauthorized"})
        status, _ = await client.post(engine, CHAT, HELLO, Authorization="Bearer secret")
        assert status == 200
        status, _ = await client.post(engine, "/tokenize", {"prompt": "open"})
        assert status == 200


async def test_live_id_is_refused_without_randomisation(client: Client) -> None:
    async with SimulatedEngine(request_id_randomization=False) as engine:
        engine.faults.add("stall_after_tokens", tokens=1, times=1)
        headers = {"X-Request-Id": "R"}
        async with client.session.post(engine.url + CHAT, json=HELLO | {"stream": True}, headers=headers):
            await engine.wait_until(lambda state: state.tokens_sent == 1)
            status, error = await client.post(engine, CHAT, HELLO, X_Request_Id="R")
            assert status == 400
            assert "already running" in error["error"]["message"]
        await engine.wait_until(lambda state: state.live == 0)


async def test_named_tool_fails_on_the_prefill_leg_of_v18(client: Client) -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    body = HELLO | {
        "tools": [tool],
        "tool_choice": {"type": "function", "function": {"name": "f"}},
        "chat_template_kwargs": {"thinking": True},
        "max_tokens": 1,
        "kv_transfer_params": {"do_remote_decode": True},
    }
    async with SimulatedEngine(role="prefill", profile_name="v0.18") as old:
        status, _ = await client.post(old, CHAT, body)
        assert status == 500
        assert len(old.pins) == 1
    async with SimulatedEngine(role="prefill", profile_name="v0.23") as new:
        status, _ = await client.post(new, CHAT, body)
        assert status == 200


@pytest.mark.parametrize(
    ("profile_name", "text_tokens", "media_tokens"),
    [("v0.18", 25, 85), ("v0.23", 25, 85), ("v0.27", 3, 3), ("v0.30", 3, 3), ("v0.33", 3, 85)],
)
async def test_chat_takes_prompt_ids_as_its_version_does(
    client: Client, profile_name: str, text_tokens: int, media_tokens: int
) -> None:
    given = {"kv_transfer_params": {"prompt_token_ids": [1, 2, 3]}}
    image = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}, {"text": "a"}]}]
    async with SimulatedEngine(profile_name=profile_name) as engine:
        _, text = await client.post(engine, CHAT, HELLO | given)
        _, media = await client.post(engine, CHAT, HELLO | given | {"messages": image})
        _, echo = await client.post(engine, CHAT, HELLO | given | {"echo": True})
        for ids in ("x", [], [-1], [True]):
            params = {"kv_transfer_params": {"prompt_token_ids": ids}}
            status, _ = await client.post(engine, CHAT, HELLO | params)
            assert status == (400 if profile_name == "v0.33" else 200)
    assert text["usage"]["prompt_tokens"] == text_tokens
    assert media["usage"]["prompt_tokens"] == media_tokens
    assert echo["usage"]["prompt_tokens"] == (25 if profile_name == "v0.33" else text_tokens)


async def test_private_key_gives_a_chat_its_prompt_where_it_is_known(client: Client) -> None:
    body = HELLO | {"kv_transfer_params": {"_vllm_ascend_recompute_token_ids": [1, 2, 3]}, "return_token_ids": True}
    async with SimulatedEngine(profile_name="v0.23", private_prompt_ids=True) as patched:
        role, *_ = await client.stream(patched, CHAT, body)
        assert role["prompt_token_ids"] == [1, 2, 3]
    async with SimulatedEngine(profile_name="v0.33") as unaware:
        role, *_ = await client.stream(unaware, CHAT, body)
        assert len(role["prompt_token_ids"]) == 25
