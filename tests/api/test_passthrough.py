"""Passed-through routes: the bytes are unchanged in both directions, on one backend."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import aiohttp
import orjson
import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, unused_port
from multidict import CIMultiDict

from proxy.api.credentials import KeyAuth
from proxy.api.passthrough import ROUTES, PassthroughApi
from proxy.api.questions import QuestionParts
from proxy.balancer.engines import EngineKeys
from proxy.common.backend import Load, Role
from proxy.gateway.api_keys import ApiKeys, KeyUsage
from proxy.listener.drain import DrainManager
from proxy.settings import Settings
from proxy.settings.live import LiveSettings
from tests.api.conftest import Gateway, never, team_key

Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]
Client = TestClient[web.Request, web.Application]

ODD_BODY = b'{"prompt":"\xff \\ud800", "n":NaN,  "n": 1e999}\r\n'


async def client_of(
    gateway: Gateway,
    groups: Sequence[str] = ("tokenizer", "pooling"),
    *,
    role: Role = Role.PREFILL,
    keys: EngineKeys | None = None,
    callers: ApiKeys | None = None,
    **sections: Any,
) -> Client:
    """Return a client of the passed-through routes. `sections`: settings."""
    retry = {"base_delay_seconds": 0.0, "max_delay_seconds": 0.0, **sections.pop("retry", {})}
    settings = Settings.model_validate({"passthrough": list(groups), "retry": retry, **sections})
    api = PassthroughApi(
        gateway.questions(keys, callers), gateway.lanes(settings, [role]), DrainManager(), LiveSettings(settings)
    )
    return await gateway.serve(api.routes(), client_max_size=2**30)


async def echo(request: web.Request) -> web.Response:
    return web.Response(body=await request.read(), headers={"Content-Type": "application/octet-stream"})


@pytest.mark.parametrize(("method", "path"), [route for routes in ROUTES.values() for route in routes])
async def test_every_listed_route_reaches_a_prefiller(gateway: Gateway, method: str, path: str) -> None:
    prefiller = await gateway.engine(Role.PREFILL, echo)
    decoder = await gateway.engine(Role.DECODE, echo)
    client = await client_of(gateway, connector="sglang_bootstrap")
    body = ODD_BODY if method == "POST" else b""
    async with client.request(method, path, data=body or None) as answer:
        assert (answer.status, await answer.read()) == (200, body)
    (asked,) = prefiller.asked
    assert (asked.method, asked.path, asked.body) == (method, path, body)
    assert decoder.asked == []


async def test_routes_of_other_groups_do_not_exist(gateway: Gateway) -> None:
    prefiller = await gateway.engine(Role.PREFILL)
    client = await client_of(gateway, ["tokenizer"])
    elsewhere = [("POST", "/v1/embeddings"), ("GET", "/v1/embeddings"), ("GET", "/model_info")]
    for method, path in [*elsewhere, ("POST", "/sleep"), ("GET", "/")]:
        async with client.request(method, path) as answer:
            assert answer.status == 404
    async with client.get("/tokenize") as answer:
        assert answer.status == 405
    assert prefiller.asked == []


async def test_only_listed_request_headers_go_out(gateway: Gateway) -> None:
    prefiller = await gateway.engine(Role.PREFILL)
    client = await client_of(gateway)
    headers = {
        "Content-Type": "application/json; charset=utf-8",
        "Accept": "application/json",
        "traceparent": "00-1-2-01",
        "Cookie": "session=1",
        "X-data-parallel-rank": "3",
        "X-Request-Id": "client-id",
        "Connection": "x-secret",
        "x-secret": "1",
        "Accept-Encoding": "gzip",
    }
    async with client.post("/tokenize?debug=1", data=b"{}", headers=headers) as answer:
        assert answer.headers["X-Request-Id"] == "client-id"
    (asked,) = prefiller.asked
    assert asked.headers == {
        "host": prefiller.name,
        "content-type": "application/json; charset=utf-8",
        "content-length": "2",
        "accept": "application/json",
        "accept-encoding": "identity",
        "traceparent": "00-1-2-01",
    }
    assert asked.query == ""


async def test_answer_headers_are_passed_on_except_connection_headers(gateway: Gateway) -> None:
    async def answer(request: web.Request) -> web.Response:
        headers = {
            "Content-Type": "application/json",
            "X-Model": "kimi",
            "X-Hop": "1",
            "X-Other-Hop": "1",
            "Keep-Alive": "timeout=5",
            "Server": "uvicorn",
            "X-Request-Id": "engines",
        }
        connection = [("Connection", "close, x-hop"), ("Connection", "X-Other-Hop")]
        return web.Response(body=b"{}", headers=CIMultiDict([*headers.items(), *connection]))

    await gateway.engine(Role.PREFILL, answer)
    client = await client_of(gateway)
    async with client.post("/tokenize") as got:
        assert await got.read() == b"{}"
        assert (got.headers["Content-Type"], got.headers["X-Model"]) == ("application/json", "kimi")
        assert not {"X-Hop", "X-Other-Hop", "Keep-Alive"} & set(got.headers)
        assert got.headers["Server"] == "pdproxy"
        assert got.headers["X-Request-Id"] != "engines"


async def test_engine_key_or_the_clients_credential_is_sent(gateway: Gateway) -> None:
    prefiller = await gateway.engine(Role.PREFILL)
    keys = gateway.keys("s3cret", [("127.0.0.1", prefiller.port)])
    for client in (await client_of(gateway, keys=keys), await client_of(gateway)):
        async with client.post("/tokenize", headers={"Authorization": "Bearer client"}):
            pass
    assert [asked.headers["authorization"] for asked in prefiller.asked] == ["Bearer s3cret", "Bearer client"]


async def test_answer_is_streamed_as_it_arrives(gateway: Gateway) -> None:
    go_on = asyncio.Event()

    async def stream(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b"first")
        await go_on.wait()
        await response.write(b"second")
        return response

    await gateway.engine(Role.PREFILL, stream)
    client = await client_of(gateway)
    async with client.post("/pooling") as answer:
        assert await answer.content.readexactly(5) == b"first"
        assert gateway.books() != {(0, Load())}
        go_on.set()
        assert await answer.read() == b"second"


@pytest.mark.parametrize("status", [400, 404, 422, 500, 503])
async def test_engines_error_passes_byte_for_byte(gateway: Gateway, status: int) -> None:
    async def refuse(request: web.Request) -> web.Response:
        return web.Response(status=status, body=ODD_BODY, headers={"Content-Type": "application/json"})

    prefiller = await gateway.engine(Role.PREFILL, refuse)
    client = await client_of(gateway)
    async with client.post("/tokenize") as answer:
        assert (answer.status, await answer.read()) == (status, ODD_BODY)
        assert answer.headers["Content-Type"] == "application/json"
    assert len(prefiller.asked) == 1
    assert f'pdproxy_requests_total{{api="tokenizer",code="{status}"}} 1.0' in gateway.metric_lines()


async def test_redirect_is_not_followed(gateway: Gateway) -> None:
    async def away(request: web.Request) -> web.Response:
        return web.Response(status=307, headers={"Location": "http://127.0.0.1:1/steal"})

    await gateway.engine(Role.PREFILL, away)
    client = await client_of(gateway)
    async with client.post("/tokenize") as answer:
        assert answer.status == 502
        assert "Location" not in answer.headers
        assert (await answer.json())["error"]["code"] == "prefill_bad_answer"


async def test_refused_connection_is_retried_on_another_engine(gateway: Gateway) -> None:
    gateway.add(Role.PREFILL, "127.0.0.1", unused_port())
    prefiller = await gateway.engine(Role.PREFILL, echo)
    client = await client_of(gateway)
    for _ in range(3):
        async with client.post("/tokenize", data=b"{}") as answer:
            assert (answer.status, await answer.read()) == (200, b"{}")
    assert len(prefiller.asked) == 3
    assert 'pdproxy_retries_total{reason="connect",stage="prefill"} 2.0' in gateway.metric_lines()


async def test_no_connection_to_any_engine_is_a_503(gateway: Gateway) -> None:
    port = unused_port()
    gateway.add(Role.DECODE, "127.0.0.1", port)
    client = await client_of(gateway, role=Role.DECODE)
    async with client.post("/tokenize") as answer:
        assert answer.status == 503
        assert answer.headers["Retry-After"] == "1"
        assert (await answer.json())["error"]["code"] == "no_healthy_decode"
    (backend,) = gateway.pools[Role.DECODE].all_backends()
    assert gateway.health.health_of(backend).consecutive_failures == 1


def saying(status: int, body: bytes = ODD_BODY) -> Answer:
    async def answer(request: web.Request) -> web.Response:
        return web.Response(status=status, body=body, headers={"Content-Type": "application/json"})

    return answer


async def drop(request: web.Request) -> web.Response:
    """Close the connection before the answer."""
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


RETRIED = {
    "429": (saying(429), "status"),
    "503": (saying(503), "status"),
    "500": (saying(500), "status"),
    "a lost connection": (drop, "reset"),
    "a redirect": (saying(307), "bad_answer"),
}


@pytest.mark.parametrize(("answer", "reason"), RETRIED.values(), ids=RETRIED)
async def test_request_is_retried_when_another_engine_may_serve_it(
    gateway: Gateway, answer: Answer, reason: str
) -> None:
    failing = await gateway.engine(Role.PREFILL, answer)
    well = await gateway.engine(Role.PREFILL, echo)
    client = await client_of(gateway)
    async with client.post("/tokenize", data=b"{}") as got:
        assert (got.status, await got.read()) == (200, b"{}")
    assert (len(failing.asked), len(well.asked)) == (1, 1)
    assert f'pdproxy_retries_total{{reason="{reason}",stage="prefill"}} 1.0' in gateway.metric_lines()


@pytest.mark.parametrize("status", [400, 401, 404, 422])
async def test_client_error_is_not_retried(gateway: Gateway, status: int) -> None:
    engines = [await gateway.engine(Role.PREFILL, saying(status)) for _ in range(2)]
    client = await client_of(gateway)
    async with client.post("/tokenize") as answer:
        assert (answer.status, await answer.read()) == (status, ODD_BODY)
    assert sum(len(engine.asked) for engine in engines) == 1


@pytest.mark.parametrize(("status", "asked"), [(429, 4), (503, 4), (500, 2)])
async def test_error_of_the_last_engine_is_passed_on(gateway: Gateway, status: int, asked: int) -> None:
    engines = [await gateway.engine(Role.PREFILL, saying(status)) for _ in range(4)]
    client = await client_of(gateway)
    async with client.post("/tokenize") as answer:
        assert (answer.status, await answer.read()) == (status, ODD_BODY)
    assert sum(len(engine.asked) for engine in engines) == asked


async def test_retries_need_a_permit_of_the_budget(gateway: Gateway) -> None:
    engines = [await gateway.engine(Role.PREFILL, saying(500)) for _ in range(2)]
    client = await client_of(gateway, retry={"budget_share": 0.0, "budget_least": 1, "budget_wait_seconds": 0.0})
    entered, go_on = asyncio.Event(), asyncio.Event()

    async def wait(request: web.Request) -> web.Response:
        entered.set()
        await go_on.wait()
        return web.Response(status=500)

    engines[1].answer = wait  # the first request is there, as its repetition, when the second would be repeated
    first = asyncio.create_task(client.post("/tokenize"))
    await entered.wait()
    async with client.post("/tokenize") as answer:
        assert answer.status == 500
    assert len(engines[0].asked) == 2
    assert "pdproxy_retry_budget_exhausted_total 1.0" in gateway.metric_lines()
    go_on.set()
    (await first).release()


async def test_no_healthy_engine_is_a_503(gateway: Gateway) -> None:
    client = await client_of(gateway)
    async with client.post("/tokenize") as answer:
        assert answer.status == 503
        assert (await answer.json())["error"]["code"] == "no_healthy_prefill"


async def test_engine_that_is_silent_for_too_long_is_a_504(gateway: Gateway) -> None:
    await gateway.engine(Role.PREFILL, never)
    others = await gateway.engine(Role.PREFILL, echo)
    client = await client_of(gateway, timeouts={"prefill_seconds": 0.05})
    async with client.post("/tokenize") as answer:
        assert answer.status == 504
    assert others.asked == []


@pytest.mark.fault(69)
async def test_slow_answer_has_the_usual_deadline(gateway: Gateway) -> None:
    async def drip(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        with contextlib.suppress(ConnectionError):
            while True:
                await response.write(b" ")
                await asyncio.sleep(0.005)
        return response

    await gateway.engine(Role.PREFILL, drip)
    client = await client_of(gateway, timeouts={"prefill_seconds": 0.1})
    async with client.post("/tokenize") as answer:
        assert answer.status == 200
        with pytest.raises(aiohttp.ClientPayloadError):
            await answer.read()
    assert 'pdproxy_streams_broken_total{reason="broken",side="engine"} 1.0' in gateway.metric_lines()


async def test_slow_client_does_not_shorten_the_engines_deadline(gateway: Gateway) -> None:
    size = 64 * 2**20  # more than the buffers in between hold

    async def pour(request: web.Request) -> web.Response:
        return web.Response(body=bytes(size))

    await gateway.engine(Role.PREFILL, pour)
    client = await client_of(
        gateway, timeouts={"prefill_seconds": 8.0}
    )  # a busy machine must be able to copy the answer
    async with client.post("/pooling") as answer:
        loop = asyncio.get_running_loop()
        over = asyncio.Event()
        loop.call_later(8.5, over.set)  # the engine's deadline passes, while its answer waits for the client
        await over.wait()
        assert len(await answer.read()) == size


async def test_broken_answer_is_cut_without_an_end_mark(gateway: Gateway) -> None:
    async def break_off(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b"half")
        assert request.transport is not None
        request.transport.close()
        return response

    await gateway.engine(Role.PREFILL, break_off)
    client = await client_of(gateway)
    async with client.post("/pooling") as answer:
        assert answer.status == 200
        with pytest.raises(aiohttp.ClientPayloadError):
            await answer.read()
    lines = gateway.metric_lines()
    assert 'pdproxy_streams_broken_total{reason="broken",side="engine"} 1.0' in lines
    assert any('result="broken"' in line for line in lines)


async def test_client_that_disconnects_frees_the_engine(gateway: Gateway) -> None:
    entered, left = asyncio.Event(), asyncio.Event()

    async def wait(request: web.Request) -> web.Response:
        entered.set()
        try:
            await asyncio.Event().wait()
            raise AssertionError("unreachable")
        finally:
            left.set()

    await gateway.engine(Role.PREFILL, wait)
    client = await client_of(gateway)
    asking = asyncio.ensure_future(client.post("/tokenize"))
    await entered.wait()
    assert gateway.books() != {(0, Load())}
    asking.cancel()
    await left.wait()
    assert gateway.books() == {(0, Load())}
    lines = gateway.metric_lines()
    assert 'pdproxy_requests_total{api="tokenizer",code="499"} 1.0' in lines
    assert any('result="abandoned"' in line and line.endswith(" 1.0") for line in lines)
    (backend,) = gateway.pools[Role.PREFILL].all_backends()
    assert gateway.health.health_of(backend).consecutive_failures == 0


async def test_client_that_does_not_read_is_disconnected(gateway: Gateway) -> None:
    async def pour(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        with contextlib.suppress(ConnectionError):
            while True:
                await response.write(bytes(2**20))
        return response

    await gateway.engine(Role.PREFILL, pour)
    client = await client_of(gateway, listen={"write_timeout_seconds": 0.05})
    async with client.post("/pooling") as answer:
        # The gateway's own patience ends this.
        while 'pdproxy_inflight_requests{api="pooling"} 1.0' in gateway.metric_lines():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        with pytest.raises(aiohttp.ClientError):
            await answer.read()
    assert 'pdproxy_streams_broken_total{reason="write_timeout",side="client"} 1.0' in gateway.metric_lines()


async def test_body_that_is_too_large_reaches_no_engine(gateway: Gateway) -> None:
    prefiller = await gateway.engine(Role.PREFILL)
    client = await client_of(gateway, listen={"max_body_bytes": 10})
    async with client.post("/tokenize", data=b"x" * 11) as answer:
        assert answer.status == 413
    assert prefiller.asked == []
    assert 'pdproxy_rejected_total{reason="too_large"} 1.0' in gateway.metric_lines()


async def test_compressed_body_is_rejected(gateway: Gateway) -> None:
    prefiller = await gateway.engine(Role.PREFILL)
    client = await client_of(gateway)
    async with client.post("/tokenize", data=b"x", headers={"Content-Encoding": "gzip"}) as answer:
        assert answer.status == 415
    assert prefiller.asked == []


async def pieces(*parts: bytes) -> AsyncIterator[bytes]:
    """Yield a body without a Content-Length."""
    for part in parts:
        yield part


async def test_held_bodies_are_limited(gateway: Gateway) -> None:
    entered, go_on = asyncio.Event(), asyncio.Event()

    async def wait(request: web.Request) -> web.Response:
        entered.set()
        await go_on.wait()
        return web.Response()

    await gateway.engine(Role.PREFILL, wait)
    client = await client_of(gateway, admission={"max_buffered_bytes": 10})
    first = asyncio.create_task(client.post("/tokenize", data=b"x" * 10))
    await entered.wait()
    for body in (b"x", pieces(b"x")):
        async with client.post("/tokenize", data=body) as answer:
            assert answer.status == 503
            assert (await answer.json())["error"]["code"] == "buffers_full"
    go_on.set()
    (await first).release()
    async with client.post("/tokenize", data=b"x") as answer:
        assert answer.status == 200


async def test_client_key_is_required_and_not_passed_on(gateway: Gateway, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    prefiller = await gateway.engine(Role.PREFILL)
    client = await client_of(gateway, callers=team_key())
    for credential, status in (("Bearer wrong", 401), ("Bearer client", 200)):
        async with client.post("/tokenize", headers={"Authorization": credential}) as answer:
            assert answer.status == status
    (asked,) = prefiller.asked
    assert "authorization" not in asked.headers
    lines = [record.fields for record in caplog.records if record.name == "proxy.access"]  # type: ignore[attr-defined]
    assert [(line["key"], line["code"]) for line in lines] == [("-", 401), ("team", 200)]


async def test_answer_size_is_limited(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("proxy.api.passthrough.MAX_ANSWER_BYTES", 10)

    async def pour(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for _ in range(11):
            await response.write(b"x")
        return await never(request)

    prefiller = await gateway.engine(Role.PREFILL, saying(200, b"x" * 11))
    client = await client_of(gateway)
    async with client.post("/pooling") as answer:  # it has a Content-Length
        assert (answer.status, (await answer.json())["error"]["code"]) == (502, "prefill_bad_answer")
    prefiller.answer = pour
    async with client.post("/pooling") as answer:
        assert answer.status == 200
        with pytest.raises(aiohttp.ClientPayloadError):
            await answer.read()
    prefiller.answer = saying(200, b"x" * 10)
    async with client.post("/pooling") as answer:
        assert (answer.status, await answer.read()) == (200, b"x" * 10)


async def test_error_body_size_is_limited(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("proxy.api.passthrough._MAX_REFUSAL_BYTES", 10)
    await gateway.engine(Role.PREFILL, saying(400, b"x" * 11))
    client = await client_of(gateway)
    async with client.post("/pooling") as answer:
        assert (answer.status, (await answer.json())["error"]["code"]) == (502, "prefill_broken")


async def test_changed_settings_apply_to_new_requests(gateway: Gateway) -> None:
    await gateway.engine(Role.PREFILL, echo)
    settings = Settings()
    keys = KeyAuth(ApiKeys(KeyUsage()))
    parts = QuestionParts(
        engine_client=gateway.engine_client, engine_keys=gateway.keys(), key_auth=keys, metrics=gateway.metrics
    )
    live = LiveSettings(settings)
    api = PassthroughApi(parts, gateway.lanes(settings), DrainManager(), live)
    client = await gateway.serve(api.routes())
    for max_body_bytes, status in ((10, 413), (11, 200)):
        live.replace_settings(Settings.model_validate({"listen": {"max_body_bytes": max_body_bytes}}))
        async with client.post("/tokenize", data=b"x" * 11) as answer:
            assert answer.status == status


async def test_each_request_has_one_access_log_line_without_content(
    gateway: Gateway, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    prefiller = await gateway.engine(Role.PREFILL, echo)
    client = await client_of(gateway)
    async with client.post("/tokenize", data=orjson.dumps({"prompt": "canary"}), headers={"X-Request-Id": "r1"}):
        pass
    (record,) = [record for record in caplog.records if record.name == "proxy.access"]
    fields: dict[str, object] = record.fields  # type: ignore[attr-defined]
    assert fields.items() >= {"id": "r1", "api": "tokenizer", "path": "/tokenize", "code": 200, "bytes": 19}.items()
    assert fields["instance"] == prefiller.name
    assert "canary" not in str(fields)
