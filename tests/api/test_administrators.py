"""Reading is free, changes need the admin key or a program on this host."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import make_mocked_request

from proxy.common.backend import Role
from proxy.common.endpoints import find_client_address
from proxy.settings.load import ConfigChange
from tests.api.conftest import Gateway
from tests.api.operating import client_of
from tests.asking import until

CHANGES = [
    *("/instances/add", "/instances/remove", "/reset_prefix_cache", "/start_profile", "/stop_profile"),
    "/admin/reload",
]
ROUTES = [("GET", "/instances"), ("GET", "/admin/config"), *(("POST", path) for path in CHANGES)]


@pytest.mark.fault(58)
@pytest.mark.parametrize(("method", "path"), ROUTES)
@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "gateway.internal"])
async def test_admin_key_is_required_on_a_reachable_listener(
    gateway: Gateway, method: str, path: str, host: str
) -> None:
    client = await client_of(gateway, listens_on=host)
    async with client.request(method, path) as answer:
        assert answer.status == 403
        error = (await answer.json())["error"]
    assert error["code"] == "admin_key_not_configured"
    assert error["message"] == (
        f"this route needs an admin key, because the gateway listens on {host}, which other hosts may reach; set "
        "auth.admin_key and send it as X-Admin-Key, or configure a listener for administrators on this host (admin."
        "port)"
    )
    client = await client_of(gateway, listens_on=host, admin_key="k-1")
    async with client.request(method, path, headers={"X-Admin-Key": "k-1"}) as answer:
        assert answer.status not in (401, 403)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.9", "localhost", "::1", "::ffff:127.0.0.1"])
async def test_admin_key_is_optional_on_a_loopback_listener(gateway: Gateway, host: str) -> None:
    client = await client_of(gateway, listens_on=host)
    async with client.get("/instances") as answer:
        assert answer.status == 200


@pytest.mark.fault(58)
@pytest.mark.parametrize(("method", "path"), ROUTES[:3])
@pytest.mark.parametrize(
    "name",
    [
        *("X-Forwarded-For", "x-forwarded-proto", "X-Forwarded-Client-Cert", "X-Forwarded", "Forwarded", "Via"),
        *("X-Real-IP", "X-Envoy-Peer-Metadata", "x-envoy-external-address", "CF-Connecting-IP", "DO-Connecting-IP"),
        *("CF-Ray", "X-Client-IP", "X-Cluster-Client-IP", "Fastly-Client-IP", "True-Client-IP", "X-Original-Host"),
        *("X-Azure-FDID", "X-Amzn-Trace-Id", "CDN-Loop", "Origin", "Referer", "Sec-Fetch-Site", "Sec-Fetch-Mode"),
    ],
)
async def test_request_with_a_forwarding_header_is_not_local(
    gateway: Gateway, method: str, path: str, name: str
) -> None:
    client = await client_of(gateway)
    async with client.request(method, path, headers={name: "127.0.0.1"}) as answer:
        assert answer.status == 403
        error = (await answer.json())["error"]
    assert error["code"] == "admin_key_not_configured"
    assert f"the header {name} shows".lower() in error["message"].lower()


@pytest.mark.parametrize(
    ("method", "path", "headers", "status"),
    [
        ("GET", "/instances", {"Sec-Fetch-Site": "same-origin", "Sec-Fetch-Mode": "cors"}, 200),
        ("GET", "/admin/config", {"Sec-Fetch-Site": "same-origin", "Sec-Fetch-Dest": "empty"}, 200),
        ("POST", "/admin/reload", {"Sec-Fetch-Site": "same-origin", "Sec-Fetch-Mode": "cors"}, 403),
        ("POST", "/instances/add", {"Sec-Fetch-Site": "same-origin", "Origin": "http://127.0.0.1:1999"}, 403),
        ("GET", "/instances", {"Sec-Fetch-Site": "same-site"}, 403),
        ("GET", "/instances", {"Sec-Fetch-Site": "cross-site"}, 403),
        ("GET", "/instances", {"Sec-Fetch-Site": "none"}, 403),
        ("GET", "/instances", {"Sec-Fetch-Mode": "cors"}, 403),
        ("GET", "/instances", {"Sec-Fetch-Site": "same-origin", "Host": "rebound.example.com"}, 403),
        ("GET", "/instances", {"Sec-Fetch-Site": "same-origin", "Origin": "http://127.0.0.1:1999"}, 403),
        ("GET", "/instances", {"Sec-Fetch-Site": "same-origin", "X-Forwarded-For": "10.0.0.1"}, 403),
    ],
)
async def test_status_page_may_read_but_not_change_without_a_key(
    gateway: Gateway, method: str, path: str, headers: Mapping[str, str], status: int
) -> None:
    client = await client_of(gateway)
    async with client.request(method, path, headers=headers) as answer:
        assert answer.status == status


@pytest.mark.fault(58)
@pytest.mark.parametrize(
    ("host", "status"),
    [
        *((host, 200) for host in ("localhost", "localhost:1999", "LOCALHOST.:1999", "gateway.localhost", "127.0.0.1")),
        *((host, 200) for host in ("127.3.2.1:80", "[::1]", "[::1]:1999", "[::ffff:127.0.0.1]:1")),
        *((host, 403) for host in ("evil.example.com", "evil.example.com:1999", "127.0.0.1.nip.io", "localhost.evil")),
        *((host, 403) for host in ("10.0.0.1:1999", "[fd00::1]:1999", "0.0.0.0:1999", "127.1", "", "[", ":", "[::1")),
    ],
)
async def test_request_with_a_foreign_host_header_is_not_local(gateway: Gateway, host: str, status: int) -> None:
    client = await client_of(gateway)  # a browser that was given this address for a name of its page sends the name
    async with client.get("/instances", headers={"Host": host}) as answer:
        assert answer.status == status


@pytest.mark.parametrize("name", ["X-Request-Id", "traceparent", "User-Agent", "Authorization", "X-Forward"])
async def test_default_headers_of_programs_are_local(gateway: Gateway, name: str) -> None:
    client = await client_of(gateway)
    async with client.get("/instances", headers={name: "a"}) as answer:
        assert answer.status == 200


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
async def test_only_this_host_may_administer_without_a_key(gateway: Gateway, peer: object, status: int) -> None:
    class Transport(asyncio.Transport):
        def get_extra_info(self, name: str, default: Any = None) -> Any:
            return peer if name == "peername" else default

        def is_closing(self) -> bool:
            return False

    client = await client_of(gateway, trusts_local=True)
    request = make_mocked_request("GET", "/instances", app=client.app, transport=Transport())
    answer = await client.app._handle(request)
    assert answer.status == status


@pytest.mark.fault(141)
@pytest.mark.parametrize(("method", "path"), ROUTES)
async def test_only_this_user_may_administer_without_a_key(gateway: Gateway, method: str, path: str) -> None:
    class Transport(asyncio.Transport):
        def get_extra_info(self, name: str, default: Any = None) -> Any:
            return {"peername": ("127.0.0.1", 1), "sockname": ("127.0.0.1", 2)}.get(name, default)

        def is_closing(self) -> bool:
            return False

    client = await client_of(gateway)
    request = make_mocked_request(method, path, app=client.app, transport=Transport())
    answer = await client.app._handle(request)
    assert answer.status == 403
    assert isinstance(answer, web.Response)
    assert json.loads(answer.text or "")["error"]["message"] == (
        "this route needs an admin key, because the system does not report which user opened the connection; set "
        "auth.admin_key and send it as X-Admin-Key, or configure a listener for administrators on this host (admin."
        "port), "
        "or set admin.trust_local if no program on this host forwards requests of other clients"
    )


@pytest.mark.parametrize("path", CHANGES)
@pytest.mark.parametrize(
    ("headers", "accept"),
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
async def test_admin_key_is_required_from_all_when_configured(
    gateway: Gateway, path: str, headers: Mapping[str, str], accept: bool
) -> None:
    client = await client_of(gateway, admin_key="k-1")
    async with client.post(path, json={"type": "prefill", "instances": ["h:1", "[bad"]}, headers=headers) as answer:
        if accept:
            assert answer.status == (400 if path.startswith("/instances/") else 200)
        else:
            assert answer.status == 401
            assert (await answer.json())["error"]["code"] == "admin_key_required"


async def test_metrics_and_probes_need_no_key(gateway: Gateway) -> None:
    client = await client_of(gateway, admin_key="k-1")
    for path in ("/livez", "/healthcheck", "/version", "/metrics"):
        async with client.get(path, headers={"X-Forwarded-For": "10.0.0.1"}) as answer:
            assert answer.status == 200


async def test_get_does_not_change_anything(gateway: Gateway) -> None:
    client = await client_of(gateway)
    for path in CHANGES:
        async with client.get(path) as answer:
            assert answer.status == 405


async def test_admin_key_is_never_shown(gateway: Gateway, caplog: pytest.LogCaptureFixture) -> None:
    client = await client_of(gateway, admin_key="canary")
    told = []
    for path in CHANGES:
        async with client.post(path, headers={"X-Admin-Key": "canar"}) as answer:
            told.append(await answer.text())
    assert "canar" not in "".join(told) + caplog.text


async def test_changes_at_a_time_are_limited(gateway: Gateway) -> None:
    begun, go_on = 0, asyncio.Event()

    async def reload(by: str, *, is_dry_run: bool = False) -> ConfigChange:
        nonlocal begun
        begun += 1
        await go_on.wait()
        return ConfigChange()

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


async def test_every_change_is_one_log_line_with_its_author(gateway: Gateway, caplog: pytest.LogCaptureFixture) -> None:
    authors = []

    async def reload(by: str, *, is_dry_run: bool = False) -> ConfigChange:
        authors.append(by)
        return ConfigChange()

    client = await client_of(gateway, reload=reload, admin_key="canary")
    await gateway.engine(Role.DECODE)
    caplog.set_level("INFO", "proxy.api")
    for path, body in (
        ("/instances/add", {"type": "decode", "instances": "10.0.0.1:1"}),
        ("/instances/remove", {"type": "decode", "instances": "10.0.0.1:1"}),
        ("/reset_prefix_cache", None),
        ("/start_profile", None),
        ("/admin/reload", None),
    ):
        async with client.post(path, json=body, headers={"X-Admin-Key": "canary"}) as answer:
            assert answer.status == 200
    by = "an administrator at 127.0.0.1"
    assert authors == [by]
    lines = [record for record in caplog.records if record.name.startswith("proxy.api")]
    assert [(line.getMessage(), vars(line)["fields"]) for line in lines] == [
        ("Instances ['10.0.0.1:1'] are waiting to be added.", {"by": by}),
        ("remove decode instances: ['10.0.0.1:1'].", {"by": by}),
        ("broadcast: sent to all instances: /reset_prefix_cache", {"by": by}),
        ("broadcast: sent to all instances: /start_profile", {"by": by}),
    ]
    assert "canary" not in caplog.text


@pytest.mark.parametrize("networks", [("127.0.0.0/8",), ("10.0.0.0/8", "::ffff:127.0.0.0/104", "127.0.0.1/32")])
async def test_request_through_a_trusted_proxy_is_not_local(gateway: Gateway, networks: tuple[str, ...]) -> None:
    client = await client_of(gateway, trusts_local=True, trusted_proxies=networks)
    async with client.get("/instances") as answer:
        assert answer.status == 403
        message = (await answer.json())["error"]["message"]
    assert "because the request came through a proxy of listen.trusted_proxies; set auth.admin_key" in message


async def test_log_names_the_client_behind_a_trusted_proxy(gateway: Gateway) -> None:
    asked: list[str] = []

    async def reload(by: str, *, is_dry_run: bool = False) -> ConfigChange:
        asked.append(by)
        return ConfigChange()

    for networks in (("127.0.0.1/32",), ()):
        client = await client_of(gateway, admin_key="k-1", trusted_proxies=networks, reload=reload)
        headers = {"X-Admin-Key": "k-1", "X-Forwarded-For": "192.0.2.7"}
        async with client.post("/admin/reload", headers=headers) as answer:
            assert answer.status == 200
    assert asked == ["an administrator at 192.0.2.7", "an administrator at 127.0.0.1"]


@pytest.mark.parametrize(
    ("peer", "forwarded", "client"),
    [
        ("10.0.0.1", ["192.0.2.7"], "192.0.2.7"),
        ("10.0.0.1", ["198.51.100.1, 192.0.2.7, 10.0.0.2"], "192.0.2.7"),
        ("10.0.0.1", ["198.51.100.1", "192.0.2.7", "10.0.0.2"], "192.0.2.7"),
        ("10.0.0.1", ["[2001:db8::1]"], "2001:db8::1"),
        ("::ffff:10.0.0.1", ["192.0.2.7"], "192.0.2.7"),
        ("10.0.0.1", ["10.0.0.9, 10.0.0.2"], "10.0.0.9"),
        ("10.0.0.1", ["192.0.2.7, nonsense"], "10.0.0.1"),
        ("10.0.0.1", [], "10.0.0.1"),
        ("192.0.2.1", ["198.51.100.1"], "192.0.2.1"),
        ("-", ["198.51.100.1"], "-"),
    ],
)
def test_client_is_the_last_address_that_is_no_trusted_proxy(peer: str, forwarded: list[str], client: str) -> None:
    assert find_client_address(peer, forwarded, ["10.0.0.0/8"]) == client
