"""The operators' routes: looking is free, changing takes the key or this host."""

from __future__ import annotations

import asyncio
import errno
from typing import TYPE_CHECKING, Any

import pytest
from aiohttp import web
from aiohttp.test_utils import make_mocked_request, unused_port

from proxy import __version__
from proxy.api.admin import FLUSH_CACHE, RESET_PREFIX_CACHE, AdminApi
from proxy.api.drain import Drain
from proxy.api.probes import ProbeApi
from proxy.balancer.backend import Load, Role
from proxy.configuration import Change
from proxy.settings import Admin, SettingsError
from proxy.upstream.addresses import AddressRules
from proxy.upstream.names import Names
from tests.asking import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping

    from aiohttp.test_utils import TestClient

    from proxy.balancer.engine_keys import EngineKeys
    from tests.api.conftest import Gateway

    Client = TestClient[web.Request, web.Application]

HOST = "127.0.0.1"
RULES = AddressRules(Admin().networks)
READY_ROUTES = ["/readyz", "/health", "/healthz", "/ping"]


async def nothing_to_reload(by: str) -> Change:
    return Change()


async def client_of(
    gateway: Gateway,
    *,
    admin_key: str | None = None,
    roles: Collection[Role] = (Role.PREFILL, Role.DECODE),
    is_draining: bool = False,
    keys: EngineKeys | None = None,
    names: Names | None = None,
    reload: Callable[[str], Awaitable[Change]] = nothing_to_reload,
    cache_path: str = RESET_PREFIX_CACHE,
) -> Client:
    pools = {role: gateway.pools[role] for role in roles}
    drain = Drain()
    drain.is_draining = is_draining
    api = AdminApi(
        pools,
        gateway.prober,
        gateway.session,
        keys or gateway.keys(),
        names or Names(RULES, (), gateway.metrics),
        gateway.metrics,
        reload,
        admin_key,
        cache_path,
    )
    return await gateway.serve([*ProbeApi(pools, drain).routes(), *api.routes()])


async def change(client: Client, what: str, **body: object) -> tuple[int, Any]:
    async with client.post(f"/instances/{what}", json=body) as answer:
        return answer.status, await answer.json()


async def test_alive_says_nothing_about_engines(gateway: Gateway) -> None:
    client = await client_of(gateway, is_draining=True)
    async with client.get("/livez") as answer:
        assert (answer.status, await answer.json()) == (200, {"status": "ok"})


@pytest.mark.parametrize("path", READY_ROUTES)
async def test_ready_means_that_each_role_has_somebody_confirmed(gateway: Gateway, path: str) -> None:
    client = await client_of(gateway)
    await gateway.engine(Role.DECODE)
    gateway.roster.add(Role.PREFILL, "10.0.0.1", 1)  # nobody has asked it yet
    async with client.get(path) as answer:
        assert answer.status == 503
        assert (await answer.json())["error"]["code"] == "no_healthy_prefill"
    await gateway.engine(Role.PREFILL)
    async with client.get(path) as answer:
        assert answer.status == 200


async def test_only_the_roles_in_use_count_for_readiness(gateway: Gateway) -> None:
    client = await client_of(gateway, roles=[Role.DECODE])
    await gateway.engine(Role.DECODE)
    async with client.get("/readyz") as answer:
        assert answer.status == 200


@pytest.mark.parametrize("path", READY_ROUTES)
async def test_a_draining_gateway_is_not_ready(gateway: Gateway, path: str) -> None:
    await gateway.engine(Role.DECODE)
    client = await client_of(gateway, roles=[Role.DECODE], is_draining=True)
    async with client.get(path) as answer:
        assert answer.status == 503
        assert (await answer.json())["error"]["code"] == "draining"


async def test_healthcheck_is_the_reference_programs(gateway: Gateway) -> None:
    await gateway.engine(Role.PREFILL)
    await gateway.engine(Role.DECODE)
    await gateway.engine(Role.DECODE)
    client = await client_of(gateway)
    with gateway.pools[Role.DECODE].lease(Load()), gateway.pools[Role.PREFILL].lease(Load()):
        async with client.get("/healthcheck") as answer:
            assert await answer.json() == {
                "status": "ok",
                "prefill_instances": 1,
                "decode_instances": 2,
                "request_num": 1,
            }


async def test_healthcheck_without_prefillers(gateway: Gateway) -> None:
    client = await client_of(gateway, roles=[Role.DECODE])
    async with client.get("/healthcheck") as answer:
        assert (await answer.json())["prefill_instances"] == 0


async def test_version(gateway: Gateway) -> None:
    client = await client_of(gateway)
    async with client.get("/version") as answer:
        assert await answer.json() == {"version": __version__}


async def test_metrics_come_in_the_format_asked_for(gateway: Gateway) -> None:
    client = await client_of(gateway)
    async with client.get("/metrics") as answer:
        assert answer.headers["Content-Type"].startswith("text/plain")
        assert "pdproxy_build_info{" in await answer.text()
    async with client.get("/metrics", headers={"Accept": "application/openmetrics-text;version=1.0.0"}) as answer:
        assert answer.headers["Content-Type"].startswith("application/openmetrics-text")
        assert (await answer.text()).endswith("# EOF\n")


async def test_an_added_instance_waits_until_it_answers(gateway: Gateway) -> None:
    arrived, go_on = asyncio.Event(), asyncio.Event()

    async def load_model(request: web.Request) -> web.Response:
        arrived.set()
        await go_on.wait()
        return web.Response()

    engine = await gateway.engine(None, load_model)
    client = await client_of(gateway)
    status, told = await change(client, "add", type="decode", instances=engine.name)
    assert status == 200
    assert told == {
        "message": f"Instances ['{engine.name}'] are waiting to be added.",
        "current_prefill_instances": [],
        "joining_prefill_instances": [],
        "current_decode_instances": [],
        "joining_decode_instances": [engine.name],
    }
    await arrived.wait()
    go_on.set()
    while gateway.prober.joining(Role.DECODE):  # noqa: ASYNC110 - joining ends without an event
        await asyncio.sleep(0)
    status, told = await change(client, "add", type="decode", instances=[engine.name])
    assert told["message"] == f"add decode instances: ['{engine.name}']."
    assert told["current_decode_instances"] == [engine.name]


async def test_an_added_prefiller_may_have_a_bootstrap_port(gateway: Gateway) -> None:
    engine = await gateway.engine(None)
    client = await client_of(gateway)
    status, _ = await change(client, "add", type="prefill", instances=f"{engine.name} 8998")
    assert status == 200
    await until(lambda: gateway.pools[Role.PREFILL].backends(), "the instance to be added")
    (backend,) = gateway.pools[Role.PREFILL].backends()
    assert (backend.name, backend.bootstrap_port) == (engine.name, 8998)


async def test_an_idle_instance_is_removed_at_once(gateway: Gateway) -> None:
    engine = await gateway.engine(Role.PREFILL)
    client = await client_of(gateway)
    status, told = await change(client, "remove", type="prefill", instances=[engine.name])
    assert status == 200
    assert told["message"] == f"remove prefill instances: ['{engine.name}']."
    assert told["current_prefill_instances"] == []


async def test_a_busy_instance_leaves_when_its_own_requests_end(gateway: Gateway) -> None:
    busy = await gateway.engine(Role.PREFILL)
    client = await client_of(gateway)
    with gateway.pools[Role.PREFILL].lease(Load()):
        other = await gateway.engine(Role.PREFILL)
        _, told = await change(client, "remove", type="prefill", instances=busy.name)
        assert told["message"] == f"Instances ['{busy.name}'] are isolated and waiting to be removed."
        assert told["current_prefill_instances"] == [busy.name, other.name]
        assert [backend.name for backend in gateway.pools[Role.PREFILL].eligible()] == [other.name]
    with gateway.pools[Role.PREFILL].lease(Load()):  # on the other one, which is nothing to the first
        _, told = await change(client, "remove", type="prefill", instances=busy.name)
        assert told["current_prefill_instances"] == [other.name]


async def test_a_joining_instance_can_be_removed(gateway: Gateway) -> None:
    async def never(request: web.Request) -> web.Response:
        await asyncio.Event().wait()
        raise AssertionError("unreachable")

    engine = await gateway.engine(None, never)
    client = await client_of(gateway)
    await change(client, "add", type="prefill", instances=engine.name)
    _, told = await change(client, "remove", type="prefill", instances=engine.name)
    assert told["joining_prefill_instances"] == []


async def test_an_ipv6_endpoint_is_written_in_brackets(gateway: Gateway) -> None:
    gateway.add(Role.DECODE, "::1", 7200)
    client = await client_of(gateway)
    _, told = await change(client, "remove", type="decode", instances="[0:0:0:0:0:0:0:1]:7200")
    assert told["message"] == "remove decode instances: ['[::1]:7200']."
    assert told["current_decode_instances"] == []


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"type": "encode", "instances": "h:1"}, "type"),
        ({"instances": "h:1"}, "type"),
        ({"type": ["prefill"], "instances": "h:1"}, "type"),
        ({"type": "prefill"}, "instances"),
        ({"type": "prefill", "instances": []}, "instances"),
        ({"type": "prefill", "instances": [1]}, "instances"),
        ({"type": "prefill", "instances": {"h:1": 1}}, "instances"),
        *(
            ({"type": "prefill", "instances": text}, "instances")
            for text in (
                "h",
                "h:",
                "h:0",
                "h:65536",
                "h:x",
                ":1",
                "::1:80",
                "http://h:1",
                "h:1/",
                "h:1/admin",
                "h:1?x",
                "h:1#x",
                "u@h:1",
                "u:p@h:1",
                "h:1-9",
                "h :1",
                "h\r\nX: y:1",
                "[fe80::1%eth0]:1",
                "h:1 0",
                "h:1 x",
            )
        ),
        ({"type": "decode", "instances": "h:1 8998"}, "instances"),
        ([], None),
        ("prefill", None),
    ],
)
async def test_anything_but_a_role_and_endpoints_is_refused(gateway: Gateway, body: object, param: str | None) -> None:
    client = await client_of(gateway)
    for what in ("add", "remove"):
        async with client.post(f"/instances/{what}", json=body) as answer:
            assert answer.status == 400
            error = (await answer.json())["error"]
        assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert gateway.prober.joining(Role.PREFILL) == []


async def test_a_body_that_is_no_json_is_refused(gateway: Gateway) -> None:
    client = await client_of(gateway)
    async with client.post("/instances/add", data=b"type=prefill") as answer:
        assert answer.status == 400
        assert (await answer.json())["error"]["code"] == "invalid_json"


async def test_an_endpoint_cannot_take_the_other_role(gateway: Gateway) -> None:
    engine = await gateway.engine(Role.PREFILL)
    client = await client_of(gateway)
    status, told = await change(client, "add", type="decode", instances=engine.name)
    assert status == 400
    assert told["error"]["message"] == f"{engine.name} is already a prefill instance"


async def test_a_role_that_the_connector_does_not_use_is_refused(gateway: Gateway) -> None:
    client = await client_of(gateway, roles=[Role.DECODE])
    status, told = await change(client, "add", type="prefill", instances="h:1")
    assert (status, told["error"]["param"]) == (400, "type")


async def test_resetting_the_prefix_cache_reaches_every_engine(gateway: Gateway) -> None:
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
async def test_engines_of_sglang_are_told_in_their_words(gateway: Gateway, path: str) -> None:
    engine = await gateway.engine(Role.PREFILL)
    client = await client_of(gateway, cache_path=FLUSH_CACHE)
    async with client.post(f"{path}?timeout=60") as answer:
        assert answer.status == 200
    (asked,) = engine.asked
    assert (asked.method, asked.path, asked.query) == ("POST", "/flush_cache", "timeout=60")


async def test_a_cache_is_not_emptied_by_looking_and_not_by_other_engines_words(gateway: Gateway) -> None:
    engine = await gateway.engine(Role.PREFILL)
    for cache_path, method, path, status in [
        (FLUSH_CACHE, "GET", "/flush_cache", 405),
        (RESET_PREFIX_CACHE, "POST", "/flush_cache", 404),
    ]:
        client = await client_of(gateway, cache_path=cache_path)
        async with client.request(method, path) as answer:
            assert answer.status == status
    assert engine.asked == []


async def test_engines_that_did_not_reset_are_named(gateway: Gateway) -> None:
    async def refuse(request: web.Request) -> web.Response:
        return web.Response(status=404)

    await gateway.engine(Role.PREFILL)
    old = await gateway.engine(Role.DECODE, refuse)
    port = unused_port()
    gateway.add(Role.DECODE, HOST, port, healthy=False)
    client = await client_of(gateway)
    async with client.post("/reset_prefix_cache") as answer:
        assert answer.status == 500
        assert await answer.json() == {"failed": [f"http://{old.name}", f"http://{HOST}:{port}"]}


CHANGES = ["/instances/add", "/instances/remove", "/reset_prefix_cache", "/admin/reload"]


@pytest.mark.parametrize("path", CHANGES)
@pytest.mark.parametrize(
    "headers",
    [
        {"X-Forwarded-For": "127.0.0.1"},
        {"Forwarded": "for=127.0.0.1"},
        {"X-Real-IP": "127.0.0.1"},
        {"Origin": "http://localhost:1999"},
    ],
)
async def test_a_request_made_for_somebody_else_is_not_local(
    gateway: Gateway, path: str, headers: Mapping[str, str]
) -> None:
    client = await client_of(gateway)
    async with client.post(path, json={}, headers=headers) as answer:
        assert answer.status == 403
        assert (await answer.json())["error"]["code"] == "admin_key_not_configured"


@pytest.mark.parametrize(
    ("peer", "status"),
    [
        (("127.0.0.1", 1), 200),
        (("127.8.8.8", 1), 200),
        (("::1", 1, 0, 0), 200),
        (("::ffff:127.0.0.1", 1, 0, 0), 200),
        (("10.0.0.1", 1), 403),
        (("::ffff:10.0.0.1", 1, 0, 0), 403),
        (("fe80::1", 1, 0, 2), 403),
        ("", 403),
        (None, 403),
    ],
)
async def test_without_a_key_only_this_host_administers(gateway: Gateway, peer: object, status: int) -> None:
    class Transport(asyncio.Transport):
        def get_extra_info(self, name: str, default: Any = None) -> Any:
            return peer if name == "peername" else default

        def is_closing(self) -> bool:
            return False

    client = await client_of(gateway)
    request = make_mocked_request("POST", "/reset_prefix_cache", app=client.app, transport=Transport())
    answer = await client.app._handle(request)
    assert answer.status == status


@pytest.mark.parametrize("path", CHANGES)
@pytest.mark.parametrize(
    ("headers", "let_in"),
    [
        ({"Authorization": "Bearer k-1"}, True),
        ({"Authorization": "bearer k-1"}, True),
        ({"X-Admin-Key": "k-1"}, True),
        ({"Authorization": "Bearer k-1", "X-Forwarded-For": "10.0.0.1"}, True),
        ({}, False),
        ({"Authorization": "Bearer k-2"}, False),
        ({"Authorization": "Basic k-1"}, False),
        ({"Authorization": "Bearer"}, False),
        ({"X-Admin-Key": "ümlaut"}, False),
        ({"X-Admin-Key": "k-1 "}, True),  # HTTP strips the space
    ],
)
async def test_with_a_key_everybody_needs_it(
    gateway: Gateway, path: str, headers: Mapping[str, str], let_in: bool
) -> None:
    client = await client_of(gateway, admin_key="k-1")
    async with client.post(path, json={"type": "prefill", "instances": ["h:1", "[bad"]}, headers=headers) as answer:
        if let_in:
            assert answer.status == (400 if path.startswith("/instances/") else 200)
        else:
            assert answer.status == 401
            assert (await answer.json())["error"]["code"] == "admin_key_required"


async def test_looking_needs_no_key(gateway: Gateway) -> None:
    client = await client_of(gateway, admin_key="k-1")
    for path in ("/livez", "/healthcheck", "/version", "/metrics"):
        async with client.get(path, headers={"X-Forwarded-For": "10.0.0.1"}) as answer:
            assert answer.status == 200


async def test_a_change_is_not_made_by_looking(gateway: Gateway) -> None:
    client = await client_of(gateway)
    for path in CHANGES:
        async with client.get(path) as answer:
            assert answer.status == 405


async def test_the_key_never_shows(gateway: Gateway, caplog: pytest.LogCaptureFixture) -> None:
    client = await client_of(gateway, admin_key="canary")
    told = []
    for path in CHANGES:
        async with client.post(path, headers={"X-Admin-Key": "canar"}) as answer:
            told.append(await answer.text())
    assert "canar" not in "".join(told) + caplog.text


async def test_an_added_instance_may_be_given_the_engine_key(gateway: Gateway) -> None:
    engine = await gateway.engine(None)
    client = await client_of(gateway, keys=gateway.keys("s3cret"))
    status, _ = await change(client, "add", type="decode", instances=engine.name, send_key=True)
    assert status == 200
    assert [backend.trusted for backend in gateway.prober.joining(Role.DECODE)] == [True]
    status, told = await change(client, "add", type="decode", instances=engine.name, send_key="yes")
    assert (status, told["error"]["param"]) == (400, "send_key")


# Where instances may be


@pytest.fixture
async def names(gateway: Gateway) -> AsyncIterator[Names]:
    """A name server that knows a few."""
    known = {"inside": ("10.0.0.7",), "metadata": ("169.254.169.254",), "world": ("93.184.216.34",)}

    def look_up(host: str) -> tuple[str, ...]:
        if host not in known:
            raise OSError(errno.ENOENT, "")
        return known[host]

    async with Names(RULES, (), gateway.metrics, look_up=look_up) as names:
        yield names


@pytest.mark.parametrize(
    "host",
    [
        *("169.254.169.254", "224.0.0.1", "0.0.0.0", "255.255.255.255", "93.184.216.34"),
        *("[fe80::1]", "[::]", "[ff02::1]", "[2001:db8::1]", "[::ffff:169.254.169.254]"),
        *("2130706433", "0x7f.1", "127.1", "0177.0.0.1", "0x7f000001"),
        *("metadata", "world", "nowhere"),
    ],
)
async def test_an_instance_may_not_be_just_anywhere(gateway: Gateway, names: Names, host: str) -> None:
    client = await client_of(gateway, names=names)
    status, told = await change(client, "add", type="decode", instances=[f"{HOST}:1", f"{host}:80"])
    assert (status, told["error"]["code"], told["error"]["param"]) == (400, "address_not_allowed", "instances")
    assert "169.254" not in told["error"]["message"].replace(host, "")
    assert "93.184" not in told["error"]["message"].replace(host, "")
    assert gateway.prober.joining(Role.DECODE) == []


@pytest.mark.parametrize("host", ["inside", "10.1.2.3", "[fd00::1]", "100.64.0.1"])
async def test_an_instance_may_be_in_the_networks_that_are_named(gateway: Gateway, names: Names, host: str) -> None:
    client = await client_of(gateway, names=names)
    status, told = await change(client, "add", type="decode", instances=f"{host}:80")
    assert (status, told["joining_decode_instances"]) == (200, [f"{host}:80"])


# Limits


@pytest.mark.parametrize("path", ["/instances/add", "/instances/remove"])
async def test_a_long_body_is_refused(gateway: Gateway, path: str) -> None:
    client = await client_of(gateway)
    async with client.post(path, data=b" " * (64 * 1024 + 1)) as answer:
        assert answer.status == 413


async def test_only_so_many_changes_are_made_at_a_time(gateway: Gateway) -> None:
    begun, go_on = 0, asyncio.Event()

    async def reload(by: str) -> Change:
        nonlocal begun
        begun += 1
        await go_on.wait()
        return Change()

    client = await client_of(gateway, reload=reload)
    async with asyncio.TaskGroup() as group:
        waiting = [group.create_task(client.post("/admin/reload")) for _ in range(10)]
        await until(lambda: begun == 10, "ten of them")
        for path in ("/admin/reload", "/instances/add", "/instances/remove"):
            async with client.post(path) as answer:
                assert (answer.status, answer.headers["Retry-After"]) == (429, "1")
                assert (await answer.json())["error"]["code"] == "too_many_changes"
        go_on.set()
    assert [task.result().status for task in waiting] == [200] * 10
    async with client.post("/admin/reload") as answer:
        assert answer.status == 200


# Reloading


async def test_a_reload_tells_what_it_has_changed(gateway: Gateway) -> None:
    async def reload(by: str) -> Change:
        return Change(("decode", "timeouts.idle_seconds"), ("10.0.0.2:1",), ("10.0.0.1:1",))

    client = await client_of(gateway, reload=reload)
    async with client.post("/admin/reload") as answer:
        assert answer.status == 200
        assert await answer.json() == {
            "changed": ["decode", "timeouts.idle_seconds"],
            "instances": {"added": ["10.0.0.2:1"], "removed": ["10.0.0.1:1"]},
        }


async def test_a_reload_that_is_refused_tells_why(gateway: Gateway) -> None:
    async def reload(by: str) -> Change:
        raise SettingsError("my.yaml: workers must be a number, not 'many'")

    client = await client_of(gateway, reload=reload)
    async with client.post("/admin/reload") as answer:
        assert answer.status == 400
        error = (await answer.json())["error"]
    assert (error["code"], error["message"]) == (
        "invalid_configuration",
        "my.yaml: workers must be a number, not 'many'",
    )


# The log


async def test_every_change_is_one_line_with_its_author(gateway: Gateway, caplog: pytest.LogCaptureFixture) -> None:
    authors = []

    async def reload(by: str) -> Change:
        authors.append(by)
        return Change()

    client = await client_of(gateway, reload=reload, admin_key="canary")
    caplog.set_level("INFO", "proxy.api.admin")
    for path, body in (
        ("/instances/add", {"type": "decode", "instances": "10.0.0.1:1"}),
        ("/instances/remove", {"type": "decode", "instances": "10.0.0.1:1"}),
        ("/reset_prefix_cache", None),
        ("/admin/reload", None),
    ):
        async with client.post(path, json=body, headers={"X-Admin-Key": "canary"}) as answer:
            assert answer.status == 200
    by = "an administrator at 127.0.0.1"
    assert authors == [by]
    lines = [record for record in caplog.records if record.name == "proxy.api.admin"]
    assert [(line.getMessage(), vars(line)["fields"]) for line in lines] == [
        ("Instances ['10.0.0.1:1'] are waiting to be added.", {"by": by}),
        ("remove decode instances: ['10.0.0.1:1'].", {"by": by}),
        ("reset the prefix cache of all instances", {"by": by}),
    ]
    assert "canary" not in caplog.text
