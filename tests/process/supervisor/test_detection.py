"""Asking engines what they are, over real sockets, as the program does before it serves."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer, unused_port

from proxy.process.supervisor.detection import detect_connector, replace_connector
from proxy.settings import LoadedSettings, Settings, SettingsError, load_settings

Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]
Serve = Callable[[dict[str, Any]], Awaitable[str]]
"""Start an engine with an answer (JSON or a handler) per path, and return its address. Other paths answer 404."""

VLLM = {"/v1/models": {"data": [{"id": "m", "owned_by": "vllm"}]}}
SGLANG = {"/v1/models": {"data": [{"id": "m", "owned_by": "sglang"}]}}


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    async with AsyncExitStack() as stack:

        async def start(answers: dict[str, Any]) -> str:
            async def answer(request: web.Request) -> web.StreamResponse:
                found = answers.get(request.path)
                if callable(found):
                    given: web.StreamResponse = await found(request)
                    return given
                return web.Response(status=404) if found is None else web.json_response(found)

            app = web.Application()
            app.router.add_route("GET", "/{path:.*}", answer)
            server = await stack.enter_async_context(TestServer(app))
            return f"127.0.0.1:{server.port}"

        yield start


def settings(prefill: list[str], decode: list[str], **sections: Any) -> Settings:
    joining = {"max_attempts": 2, "interval_seconds": 0.001}
    return Settings.model_validate(
        {"connector": "auto", "prefill": prefill, "decode": decode, "joining": joining, **sections}
    )


async def find(prefill: list[str], decode: list[str], **sections: Any) -> str:
    """Run the detection in a thread, because the program has no event loop at that time."""
    return await asyncio.to_thread(detect_connector, LoadedSettings(settings(prefill, decode, **sections), {}))


def sglang(mode: str, path: str = "/server_info") -> dict[str, Any]:
    return {**SGLANG, path: {"disaggregation_mode": mode}}


@pytest.mark.parametrize("path", ["/server_info", "/get_server_info"])
async def test_sglang_is_recognised(serve: Serve, path: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    engines = [await serve(sglang(mode, path)) for mode in ("prefill", "decode")]
    assert await find(engines[:1], engines[1:]) == "sglang_bootstrap"
    assert [record.getMessage() for record in caplog.records if record.name.startswith("proxy")] == [
        "connector: auto selects sglang_bootstrap: 1 prefill and 1 decode instance are SGLang"
    ]


@pytest.mark.parametrize("path", ["/server_info", "/get_server_info"])
async def test_engines_that_were_mixed_up_are_a_mistake_of_the_operator(serve: Serve, path: str) -> None:
    engines = [await serve(sglang(mode, path)) for mode in ("prefill", "decode")]
    with pytest.raises(SettingsError, match="is configured as a prefiller but was started with --disaggregation-mode"):
        await find(engines[1:], engines[:1])


async def test_vllm_tells_more_when_it_is_asked_for_json(serve: Serve) -> None:
    async def info(request: web.Request) -> web.Response:
        transfer = {"kv_connector": "MooncakeLayerwiseConnector", "kv_role": "kv_both"}
        config = {"kv_transfer_config": transfer} if request.query == {"config_format": "json"} else "text"
        return web.json_response({"vllm_config": config})

    engine = {**VLLM, "/server_info": info}
    assert await find([await serve(engine)], [await serve(engine)]) == "ascend_layerwise"


async def test_engine_key_goes_along(serve: Serve) -> None:
    async def guarded(request: web.Request) -> web.Response:
        if request.headers.get("Authorization") != "Bearer sk-engine":
            return web.Response(status=401)
        return web.json_response(VLLM["/v1/models"])

    engines = [await serve({"/v1/models": guarded}) for _ in range(2)]
    assert await find(engines[:1], engines[1:], auth={"engine_api_key": "sk-engine"}) == "vllm_pull"
    with pytest.raises(ConnectionError, match="/v1/models answered with status 401"):
        await find(engines[:1], engines[1:])


async def test_gateway_starts_when_an_engine_is_down(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    down = f"127.0.0.1:{unused_port()}"
    assert await find([await serve(VLLM), down], [await serve(VLLM)]) == "vllm_pull"
    assert f"; {down} did not say (cannot connect (connection refused))" in caplog.text


async def test_engines_that_are_still_loading_are_asked_again(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    asked = 0

    async def loading(request: web.Request) -> web.Response:
        nonlocal asked
        asked += 1
        return web.Response(status=503) if asked == 1 else web.json_response(VLLM["/v1/models"])

    assert await find([await serve({"/v1/models": loading})], [await serve(VLLM)]) == "vllm_pull"
    assert asked == 2
    assert caplog.text.count("/v1/models answered with status 503") == 1


async def test_without_an_answer_of_each_role_there_is_an_end_of_asking(serve: Serve) -> None:
    down = f"127.0.0.1:{unused_port()}"
    with pytest.raises(ConnectionError) as raised:
        await find([await serve(VLLM)], [down])
    assert str(raised.value) == (
        f"connector auto: no decode instance says what it is; {down}: cannot connect (connection refused). "
        "To start without asking the engines, set the option connector to a name"
    )


@pytest.mark.parametrize(
    ("engine", "reason"),
    [
        ({"/v1/models": lambda _: asyncio.sleep(3600)}, "/v1/models did not answer within 0.05 s"),
        (
            {"/v1/models": lambda _: asyncio.sleep(0, web.Response(text="<html>"))},
            "/v1/models failed (JSONDecodeError)",
        ),
        (
            {"/v1/models": lambda _: asyncio.sleep(0, web.Response(status=307, headers={"Location": "/"}))},
            "/v1/models answered with status 307",
        ),
    ],
)
async def test_engine_that_says_nothing_of_use_is_named_with_the_reason(
    serve: Serve, engine: dict[str, Answer], reason: str
) -> None:
    with pytest.raises(ConnectionError) as raised:
        await find([await serve(engine)], [await serve(VLLM)], health={"timeout_seconds": 0.05})
    assert reason in str(raised.value)


def test_connector_is_plain_without_asking_engines_when_no_prefillers_exist() -> None:
    assert detect_connector(load_settings(["--connector", "auto", "--decode", "10.255.255.1:1"], {})) == "plain"


def test_named_connector_is_used_without_asking_engines() -> None:
    named = settings(["10.255.255.1:1"], ["10.255.255.2:1"]).model_copy(update={"connector": "vllm_pull"})
    assert detect_connector(LoadedSettings(named, {})) == "vllm_pull"


def test_detected_connector_survives_a_reload() -> None:
    auto = LoadedSettings(settings(["h:1"], ["h:2"]), {})
    assert replace_connector(auto, "vllm_store").settings.connector == "vllm_store"
    named = LoadedSettings(auto.settings.model_copy(update={"connector": "vllm_pull"}), {})
    assert replace_connector(named, "vllm_store") is named


def test_detected_connector_must_suit_the_other_settings() -> None:
    everywhere = LoadedSettings(settings(["h:1"], ["h:2"], listen={"host": "0.0.0.0"}), {})
    with pytest.raises(
        SettingsError, match=r"^connector auto is ascend_layerwise: layerwise.advertised_host must be an address"
    ):
        replace_connector(everywhere, "ascend_layerwise")
