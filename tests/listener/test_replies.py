"""Errors in OpenAI's shape, the request id on every answer, and connections that are cut rather than ended."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import orjson
import pytest
from aiohttp import web

from proxy.common.backend import Backend, Role
from proxy.common.errors import (
    BadRequest,
    Failure,
    GatewayError,
    LimitExceeded,
    NoBackendAvailable,
    Overloaded,
    Unauthorized,
    UpstreamError,
)
from proxy.listener.replies import REQUEST_ID, closing_error_bytes, error_response, rejection_reason, retry_headers
from proxy.observe import logs
from proxy.observe.metrics import REJECTIONS
from tests.api.conftest import Gateway
from tests.listener.listeners import HEAD, serving

BACKEND = Backend(Role.DECODE, "10.0.0.1", 7200)


def engine_error(status: int, **headers: str) -> UpstreamError:
    return UpstreamError(Failure.STATUS, BACKEND, "no", engine_status=status, body=b'{"x": 1 }', headers=headers)


def overloaded() -> GatewayError:
    error = GatewayError("busy", status=429, code="overloaded")
    error.retry_after_seconds = 0.2
    return error


def body_of(error: GatewayError) -> Any:
    response = error_response(error)
    assert isinstance(response.body, bytes)
    return orjson.loads(response.body)["error"]


def raising(error: Exception) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    async def handler(request: web.Request) -> web.StreamResponse:
        raise error

    return handler


def test_error_answer_has_the_openai_format() -> None:
    error = BadRequest("n must be a positive integer", param="n")
    assert error_response(error).status == 400
    assert body_of(error) == {
        "message": "n must be a positive integer",
        "type": "invalid_request_error",
        "param": "n",
        "code": "invalid_request",
    }


@pytest.mark.parametrize(
    ("error", "kind", "code"),
    [
        (overloaded(), "rate_limit_error", "overloaded"),
        (NoBackendAvailable(Role.PREFILL), "server_error", "no_healthy_prefill"),
        (UpstreamError(Failure.TIMEOUT, BACKEND, "late"), "server_error", "decode_timeout"),
    ],
)
def test_error_type_depends_on_the_status(error: GatewayError, kind: str, code: str) -> None:
    assert (body_of(error)["type"], body_of(error)["code"]) == (kind, code)


@pytest.mark.parametrize("error", [BadRequest("no"), overloaded(), UpstreamError(Failure.TIMEOUT, BACKEND, "late")])
def test_error_of_the_gateway_has_its_code_in_a_header(error: GatewayError) -> None:
    assert error_response(error).headers["X-PDProxy-Error-Code"] == error.code
    assert "X-PDProxy-Error-Code" not in error_response(engine_error(500)).headers


def test_401_has_www_authenticate() -> None:
    assert error_response(Unauthorized("no")).headers["WWW-Authenticate"] == "Bearer"
    assert "WWW-Authenticate" not in error_response(BadRequest("no")).headers


def test_engine_error_passes_unchanged() -> None:
    headers = {"content-type": "application/problem+json", "x-engine": "secret", "retry-after": "7"}
    response = error_response(engine_error(429, **headers))
    assert (response.status, response.body) == (429, b'{"x": 1 }')
    assert response.headers["Content-Type"] == "application/problem+json"
    assert response.headers["Retry-After"] == "7"
    assert "x-engine" not in response.headers


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (overloaded(), {"Retry-After": "1", "retry-after-ms": "200"}),
        (NoBackendAvailable(Role.DECODE), {"Retry-After": "1", "retry-after-ms": "1000"}),
        (BadRequest("no"), {}),
        (GatewayError("oops"), {"x-should-retry": "false"}),
        (UpstreamError(Failure.CONNECT, BACKEND, "down"), {"x-should-retry": "false"}),
        (engine_error(500), {"x-should-retry": "false"}),
        (engine_error(409), {"x-should-retry": "false"}),
        (engine_error(404), {}),
        (engine_error(503), {}),
        (engine_error(429), {}),
    ],
)
def test_errors_have_retry_headers(error: GatewayError, expected: dict[str, str]) -> None:
    assert retry_headers(error) == expected


def with_code(code: str, status: int) -> GatewayError:
    return GatewayError("no", code=code, status=status)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (BadRequest("no"), "invalid_request"),
        (BadRequest("no", code="invalid_json"), "invalid_request"),
        (Unauthorized("no"), "unauthorized"),
        (LimitExceeded("no", code="key_concurrency", retry_after_seconds=1.0), "key_concurrency"),
        (LimitExceeded("no", code="key_rate", retry_after_seconds=1.0), "key_rate"),
        *((Overloaded("no", code=code), code) for code in ("queue_full", "queue_timeout", "buffers_full", "memory")),
        (Overloaded("no", code="too_many_connections"), "connections"),
        (NoBackendAvailable(Role.PREFILL), "no_healthy_prefill"),
        (NoBackendAvailable(Role.DECODE), "no_healthy_decode"),
        (with_code("draining", 503), "draining"),
        (with_code("queue_predicted", 429), "queue_predicted"),
        (with_code("queue_deadline", 504), "queue_deadline"),
        (with_code("request_too_large", 413), "too_large"),
        (with_code("malformed_http", 400), "malformed_http"),
        (with_code("malformed_http", 431), "malformed_http"),
        (with_code("slow_header", 408), "slow_header"),
        (with_code("slow_body", 408), "slow_body"),
        (with_code("content_encoding", 415), "content_encoding"),
        (with_code("not_found", 404), None),
        (GatewayError("oops"), None),
        (engine_error(413), None),
        (engine_error(429), None),
        (UpstreamError(Failure.CONNECT, BACKEND, "down"), None),
    ],
)
def test_rejection_is_counted_by_reason(error: GatewayError, reason: str | None) -> None:
    assert rejection_reason(error) == reason
    assert reason is None or reason in REJECTIONS


def test_last_words_equal_the_error_response() -> None:
    words = closing_error_bytes(NoBackendAvailable(Role.DECODE), "r-1")
    head, _, body = words.partition(b"\r\n\r\n")
    assert body == error_response(NoBackendAvailable(Role.DECODE)).body
    first, *lines = head.decode().split("\r\n")
    assert first == "HTTP/1.1 503 Service Unavailable"
    headers = dict(line.split(": ", 1) for line in lines)
    assert headers.pop("Date").endswith(" GMT")
    assert headers == {
        "Content-Type": "application/json",
        "Content-Length": str(len(body)),
        "Retry-After": "1",
        "retry-after-ms": "1000",
        "X-PDProxy-Error-Code": "no_healthy_decode",
        "X-Request-Id": "r-1",
        "Server": "pdproxy",
        "Connection": "close",
    }


async def test_gateway_error_becomes_an_error_answer(gateway: Gateway) -> None:
    client = await gateway.serve([web.get("/", raising(NoBackendAvailable(Role.DECODE)))])
    async with client.get("/") as answer:
        assert answer.status == 503
        assert answer.content_type == "application/json"
        assert (await answer.json())["error"]["code"] == "no_healthy_decode"
    assert 'pdproxy_rejected_total{reason="no_healthy_decode"} 1.0' in gateway.metric_lines()


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/nowhere", 404, "not_found"),
        ("POST", "/v1/../instances/add", 404, "not_found"),
        ("DELETE", "/", 405, "method_not_allowed"),
        ("POST", "/", 413, "request_too_large"),
    ],
)
async def test_aiohttp_errors_have_the_format_of_the_gateway(
    gateway: Gateway, method: str, path: str, status: int, code: str
) -> None:
    async def read(request: web.Request) -> web.Response:
        return web.Response(body=await request.read())

    client = await gateway.serve([web.post("/", read)], client_max_size=10)
    async with client.request(method, path, data=b"x" * 11) as answer:
        assert answer.status == status
        error = (await answer.json())["error"]
        assert answer.headers["Server"] == "pdproxy"
        assert answer.headers.get("Allow") == ("POST" if status == 405 else None)
    assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", None, code)
    assert sorted(error) == ["code", "message", "param", "type"]


HTTP_ERRORS = [
    kind
    for kind in vars(web).values()
    if isinstance(kind, type)
    and issubclass(kind, web.HTTPError)
    and kind.status_code
    not in (-1, 405, 413, 451)  # abstract, tested by other tests, or with more arguments than a text
]


@pytest.mark.parametrize("raised", HTTP_ERRORS)
async def test_every_aiohttp_error_has_a_message_of_the_gateway(gateway: Gateway, raised: type[web.HTTPError]) -> None:
    client = await gateway.serve([web.get("/", raising(raised(text="<b>aiohttp</b>")))])
    async with client.get("/") as answer:
        assert answer.status == raised.status_code
        text = await answer.text()
    error = orjson.loads(text)["error"]
    assert sorted(error) == ["code", "message", "param", "type"]
    assert "aiohttp" not in text


async def test_answer_before_the_whole_body_closes_the_connection() -> None:
    """Otherwise the rest of the body would have to be waited for."""
    async with serving() as site:
        early = await site.ask(HEAD.replace(b"chat", b"chess") + b"Content-Length: 2\r\n\r\n{")
        reply = await early.reply()
        assert (reply.status, reply.closes) == (404, True)
        late = await site.ask(HEAD.replace(b"chat", b"chess") + b"Content-Length: 2\r\n\r\n{}")
        reply = await late.reply()
        assert (reply.status, reply.closes) == (404, False)


async def test_unexpected_exception_does_not_log_the_body(caplog: pytest.LogCaptureFixture) -> None:
    async with serving() as site:
        client = await site.ask(b"POST /fail HTTP/1.1\r\nHost: x\r\nContent-Length: 6\r\n\r\nsecret")
        assert (await client.reply()).code == "internal_error"
        (record,) = caplog.records
        assert record.getMessage() == "request: unexpected ValueError: POST /fail"
        assert 'raise ValueError(f"cannot read' in caplog.text
        assert "secret" not in caplog.text


async def test_unexpected_exception_is_a_500_with_one_traceback(
    gateway: Gateway, caplog: pytest.LogCaptureFixture
) -> None:
    client = await gateway.serve([web.get("/", raising(ZeroDivisionError("secret detail")))])
    async with client.get("/") as answer:
        assert answer.status == 500
        text = await answer.text()
    assert orjson.loads(text)["error"]["code"] == "internal_error"
    assert "secret detail" not in text
    (record,) = (record for record in caplog.records if record.name.startswith("proxy."))
    assert (record.levelname, record.name) == ("ERROR", "proxy.listener.replies")
    assert record.exc_info is not None


async def test_expected_errors_leave_no_traceback(gateway: Gateway, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, logger="proxy")
    client = await gateway.serve([web.get("/", raising(BadRequest("no")))])
    async with client.get("/") as answer:
        assert answer.status == 400
    async with client.get("/nowhere") as answer:
        assert answer.status == 404
    assert not [record for record in caplog.records if record.exc_info]


@pytest.mark.parametrize("given", ["r-1", "a.b:C_9", "x" * 128])
async def test_request_id_of_the_client_is_kept(gateway: Gateway, given: str) -> None:
    async def handler(request: web.Request) -> web.Response:
        return web.Response(text=f"{request[REQUEST_ID]} {logs.request_id.get()}")

    client = await gateway.serve([web.get("/", handler)])
    async with client.get("/", headers={"X-Request-Id": given}) as answer:
        assert await answer.text() == f"{given} {given}"
        assert answer.headers["X-Request-Id"] == given
    async with client.get("/nowhere", headers={"X-Request-Id": given}) as answer:
        assert answer.headers["X-Request-Id"] == given
    assert logs.request_id.get() == ""


@pytest.mark.parametrize("given", ["", "two words", "x" * 129, 'quote"', "ümlaut", "a\tb"])
async def test_unacceptable_request_id_is_replaced(gateway: Gateway, given: str) -> None:
    client = await gateway.serve([web.get("/", raising(BadRequest("no")))])
    async with client.get("/", headers={"X-Request-Id": given}) as answer:
        assert re.fullmatch(r"[0-9a-f]{32}", answer.headers["X-Request-Id"])


async def test_streamed_answers_have_request_id_and_server(gateway: Gateway) -> None:
    async def stream(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b"data: 1\n\n")
        return response

    client = await gateway.serve([web.get("/", stream)])
    async with client.get("/", headers={"X-Request-Id": "r1"}) as answer:
        assert (answer.headers["X-Request-Id"], answer.headers["Server"]) == ("r1", "pdproxy")
        assert await answer.read() == b"data: 1\n\n"


@pytest.mark.parametrize("error", [UpstreamError(Failure.BROKEN, BACKEND, "gone"), ZeroDivisionError()])
async def test_answer_that_fails_halfway_is_cut_off(gateway: Gateway, error: Exception) -> None:
    async def stream(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b"half")
        raise error

    client = await gateway.serve([web.get("/", stream)])
    with pytest.raises(aiohttp.ClientError):
        async with client.get("/") as answer:
            await answer.read()


async def test_client_that_leaves_is_no_error(gateway: Gateway, caplog: pytest.LogCaptureFixture) -> None:
    entered, ended = asyncio.Event(), asyncio.Event()

    async def wait(request: web.Request) -> web.Response:
        entered.set()
        try:
            await asyncio.Event().wait()
            raise AssertionError("unreachable")
        finally:
            ended.set()

    client = await gateway.serve([web.get("/", wait)])
    asking = asyncio.ensure_future(client.get("/"))
    await entered.wait()
    asking.cancel()
    await ended.wait()
    assert caplog.records == []
