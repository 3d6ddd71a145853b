"""Requests of administrators to all engines at once."""

from __future__ import annotations

from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import unused_port

from proxy.api.broadcasts import RESET_PREFIX_CACHE
from proxy.balancer.pick import PickRequest
from proxy.common.backend import Load, Role
from tests.api.conftest import Gateway
from tests.api.operating import client_of

HOST = "127.0.0.1"


async def test_reset_of_the_prefix_cache_reaches_every_engine(gateway: Gateway) -> None:
    engines = [await gateway.engine(role) for role in 2 * (Role.PREFILL, Role.DECODE)]
    keys = gateway.keys("s3cret", [(HOST, engines[0].port)])
    client = await client_of(gateway, keys=keys)
    async with client.post("/reset_prefix_cache?reset_external=true&x=a%20b&x=2") as answer:
        assert (answer.status, await answer.read()) == (200, b"")
    for engine in engines:
        (asked,) = engine.asked
        assert (asked.method, asked.path, asked.query) == (
            "POST",
            "/reset_prefix_cache",
            "reset_external=true&x=a b&x=2",
        )
    assert [e.asked[0].headers.get("authorization") for e in engines] == ["Bearer s3cret", None, None, None]


@pytest.mark.parametrize("path", ["/flush_cache", "/reset_prefix_cache"])
async def test_sglang_engines_get_their_own_path(gateway: Gateway, path: str) -> None:
    engine = await gateway.engine(Role.PREFILL)
    client = await client_of(gateway, cache_path="/flush_cache")
    async with client.post(f"{path}?timeout=60") as answer:
        assert answer.status == 200
    (asked,) = engine.asked
    assert (asked.method, asked.path, asked.query) == ("POST", "/flush_cache", "timeout=60")


async def test_get_and_paths_of_other_engines_do_not_empty_a_cache(gateway: Gateway) -> None:
    engine = await gateway.engine(Role.PREFILL)
    for cache_path, method, path, status in [
        ("/flush_cache", "GET", "/flush_cache", 405),
        (RESET_PREFIX_CACHE, "POST", "/flush_cache", 404),
    ]:
        client = await client_of(gateway, cache_path=cache_path)
        async with client.request(method, path) as answer:
            assert answer.status == status
    assert engine.asked == []


async def test_engines_that_failed_to_reset_are_named(gateway: Gateway) -> None:
    await gateway.engine(Role.PREFILL)
    old = await gateway.engine(Role.DECODE, _refuse)
    port = unused_port()
    gateway.add(Role.DECODE, HOST, port, healthy=False)
    client = await client_of(gateway)
    async with client.post("/reset_prefix_cache") as answer:
        assert answer.status == 500
        assert await answer.json() == {"failed": [f"http://{old.name}", f"http://{HOST}:{port}"]}


@pytest.mark.parametrize("path", ["/start_profile", "/stop_profile"])
async def test_every_engine_is_profiled(gateway: Gateway, path: str) -> None:
    engines = [await gateway.engine(role) for role in (Role.PREFILL, Role.DECODE)]
    client = await client_of(gateway)
    options = b'{"num_steps": 5}'  # as SGLang takes them
    async with client.post(f"{path}?x=1", data=options, headers={"Content-Type": "application/json"}) as answer:
        assert (answer.status, await answer.read()) == (200, b"")
    async with client.post(path) as answer:
        assert answer.status == 200
    for engine in engines:
        with_options, without = engine.asked
        assert (with_options.method, with_options.path, with_options.query) == ("POST", path, "x=1")
        assert (with_options.body, with_options.headers["content-type"]) == (options, "application/json")
        assert (without.method, without.path, without.query, without.body) == ("POST", path, "", b"")


async def test_engines_without_a_profiler_are_named(gateway: Gateway) -> None:
    await gateway.engine(Role.PREFILL)
    decoder = await gateway.engine(Role.DECODE, _refuse)
    client = await client_of(gateway)
    async with client.post("/start_profile") as answer:
        assert (answer.status, await answer.json()) == (500, {"failed": [f"http://{decoder.name}"]})


@pytest.mark.parametrize(
    "path", ["/sleep", "/wake_up", "/release_memory_occupation", "/resume_memory_occupation", "/reset_prefix_cache"]
)
async def test_engines_may_be_selected_by_role_or_name(gateway: Gateway, path: str) -> None:
    prefiller, *decoders = [await gateway.engine(role) for role in (Role.PREFILL, Role.DECODE, Role.DECODE)]
    client = await client_of(gateway)
    for query in ("role=decode&level=1", f"instance={prefiller.name}&level=1&instance={decoders[0].name}"):
        async with client.post(f"{path}?{query}") as answer:
            assert (answer.status, await answer.read()) == (200, b"")
    assert [len(engine.asked) for engine in (prefiller, *decoders)] == [1, 2, 1]
    assert {(asked.path, asked.query) for asked in (*prefiller.asked, *decoders[0].asked)} == {(path, "level=1")}


@pytest.mark.parametrize(
    ("query", "param"),
    [("role=decoder", "role"), ("instance=d:1", "instance"), ("role=decode&instance={}", "instance")],
)
async def test_unknown_instance_is_rejected(gateway: Gateway, query: str, param: str) -> None:
    engines = [await gateway.engine(role) for role in (Role.PREFILL, Role.DECODE)]
    client = await client_of(gateway)
    async with client.post(f"/sleep?{query.format(engines[0].name)}") as answer:
        assert (answer.status, (await answer.json())["error"]["param"]) == (400, param)
    assert not any(engine.asked for engine in engines)


@pytest.mark.parametrize(
    ("sleep", "wake", "some"),
    [
        ("/sleep", "/wake_up", {"params": {"tags": "weights"}}),
        ("/release_memory_occupation", "/resume_memory_occupation", {"json": {"tags": ["weights"]}}),
    ],
)
async def test_sleeping_instance_gets_no_requests(
    gateway: Gateway, sleep: str, wake: str, some: dict[str, Any]
) -> None:
    decoders = [await gateway.engine(role) for role in (Role.DECODE, Role.DECODE)]
    pool, client = gateway.pools[Role.DECODE], await client_of(gateway)

    def able() -> int:
        return sum(member.may_serve for member in gateway.roster.members_of_role(Role.DECODE))

    async with client.post(f"{sleep}?instance={decoders[0].name}") as answer:
        assert (answer.status, able()) == (200, 1)
    with pool.make_lease(PickRequest.make_for_load(Load(compute_tokens=1))) as lease:
        assert lease.backend.name == decoders[1].name
    async with client.post(wake, **some) as answer:
        assert (answer.status, able()) == (200, 1)
    async with client.post(wake) as answer:
        assert (answer.status, able()) == (200, 2)


async def test_busy_instance_is_disabled_before_it_sleeps(gateway: Gateway) -> None:
    decoder = await gateway.engine(Role.DECODE)
    client = await client_of(gateway)
    with gateway.pools[Role.DECODE].make_lease(PickRequest.make_for_load(Load(compute_tokens=1))):
        async with client.post("/sleep?role=decode") as answer:
            urls = [f"http://{decoder.name}"]
            assert (answer.status, await answer.json()) == (500, {"failed": urls, "disabled": urls})
    assert decoder.asked == []
    assert not any(member.may_serve for member in gateway.roster.members_of_role(Role.DECODE))
    async with client.post("/sleep?role=decode") as answer:
        assert answer.status == 200
    assert [asked.path for asked in decoder.asked] == ["/sleep"]


async def test_instance_that_rejects_sleep_serves_as_before(gateway: Gateway, caplog: pytest.LogCaptureFixture) -> None:
    decoder = await gateway.engine(Role.DECODE, _refuse)
    client = await client_of(gateway)
    for is_disabled in (False, True):
        if is_disabled:  # by an administrator, before
            gateway.roster.disable_backend(Role.DECODE, HOST, decoder.port, leaves_at=1e9)
        async with client.post("/sleep") as answer:
            disabled = [f"http://{decoder.name}"] if is_disabled else []
            assert (answer.status, (await answer.json())["disabled"]) == (500, disabled)
        (member,) = gateway.roster.members_of_role(Role.DECODE)
        assert (member.is_disabled, member.must_leave_at) == ((True, 1e9) if is_disabled else (False, None))
    failed = f"broadcast: decode instance {decoder.name} failed on /sleep"
    assert [line for line in caplog.messages if "failed" in line] == [
        f"{failed}: status 404",
        f"{failed} and stays disabled: status 404",
    ]


async def test_busy_instance_that_later_rejects_sleep_stays_disabled(gateway: Gateway) -> None:
    decoder = await gateway.engine(Role.DECODE, _refuse)
    client = await client_of(gateway)
    with gateway.pools[Role.DECODE].make_lease(PickRequest.make_for_load(Load(compute_tokens=1))):
        async with client.post("/sleep") as answer:
            assert answer.status == 500
    async with client.post("/sleep") as answer:
        urls = [f"http://{decoder.name}"]
        assert (answer.status, await answer.json()) == (500, {"failed": urls, "disabled": urls})
    assert not any(member.may_serve for member in gateway.roster.members_of_role(Role.DECODE))


async def _refuse(request: web.Request) -> web.Response:
    return web.Response(status=404)
