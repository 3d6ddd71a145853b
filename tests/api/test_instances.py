"""The instances: showing, adding and removing them."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web

from proxy.balancer.backend_health import HealthState
from proxy.balancer.engines import EngineFacts
from proxy.balancer.incompatibilities import IncompatibilityKind
from proxy.balancer.pick import PickRequest
from proxy.balancer.policies.least_decode_seconds import LeastDecodeSeconds
from proxy.common.backend import Load, Role
from proxy.settings import Settings
from proxy.upstream.names import HostNames
from tests.api.conftest import Gateway, never
from tests.api.operating import RULES, Client, change, client_of
from tests.asking import until

HOST = "127.0.0.1"


async def shown(client: Client) -> list[dict[str, Any]]:
    async with client.get("/instances") as answer:
        assert answer.status == 200
        told: list[dict[str, Any]] = (await answer.json())["instances"]
        return told


async def test_all_instances_are_shown_with_their_details(gateway: Gateway) -> None:
    prefiller = await gateway.engine(Role.PREFILL)
    decoder = await gateway.engine(Role.DECODE)
    gateway.health.set_engine_facts(gateway.pools[Role.DECODE].all_backends()[0], EngineFacts((0, 23), 4096, 16))
    client = await client_of(gateway)
    gateway.health_board.set_state(1, gateway.pools[Role.DECODE].all_backends()[0], HealthState.EJECTED)
    gateway.incompatibilities.add_finding(
        gateway.pools[Role.DECODE].all_backends()[0], IncompatibilityKind.MODEL, "serves another model"
    )
    with gateway.pools[Role.DECODE].make_lease(PickRequest.make_for_load(Load(compute_tokens=7, kv_tokens=100))):
        first, second = await shown(client)
    (misfit,) = second.pop("misfits")
    seconds = (first.pop("since_seconds"), second.pop("since_seconds"), misfit.pop("since_seconds"))
    assert all(0 <= past < 60 for past in seconds)
    nothing = {"version": None, "max_model_len": None, "max_num_seqs": None, "kv_tokens": None}
    idle = {
        "inflight": 0,
        "running": 0,
        "max_running": None,
        "learned_max_running": None,
        "compute_tokens": 0,
        "kv_tokens": 0,
        "pinned_kv": 0,
        "pinned_kv_tokens": 0,
    }
    assert misfit == {"kind": "model", "hint": "serves another model"}
    well = {
        "bootstrap_port": None,
        "configured": False,
        "origins": ["admin"],
        "membership": "enabled",
        "weight": 100,
        "elastic": None,
        "state": "up",
        "reason": "passed its health check",
        "models": [],
        "evacuated_in_seconds": None,
    }
    assert first == {
        "role": "prefill",
        "address": prefiller.name,
        **well,
        "states": {"unknown": 3},
        "load": idle,
        "kv": None,
        "kv_from": None,
        "slow_from": None,
        "apart_from": [],
        "misfits": [],
        "engine": nothing,
    }
    assert second == {
        "role": "decode",
        "address": decoder.name,
        **well,
        "states": {"unknown": 2, "ejected": 1},
        "load": {**idle, "inflight": 1, "running": 1, "max_running": 16, "compute_tokens": 7, "kv_tokens": 100},
        "kv": "unknown",
        "kv_from": {},
        "slow_from": {},
        "apart_from": [],
        "engine": {"version": "0.23", "max_model_len": 4096, "max_num_seqs": 16, "kv_tokens": None},
    }


async def test_learned_limit_of_a_decoder_is_shown(gateway: Gateway) -> None:
    """Operators see in GET /instances and on the status page that requests may wait for this limit."""
    await gateway.engine(Role.DECODE)
    policy = LeastDecodeSeconds()
    policy.decode_pace.saturation_answers = 12.0
    gateway.pools[Role.DECODE].use_policy(policy)
    (decoder,) = await shown(await client_of(gateway))
    assert decoder["load"]["learned_max_running"] == 12


async def test_instances_are_shown_until_they_are_gone(gateway: Gateway) -> None:
    absent = await gateway.engine(None, never)
    gateway.add(Role.DECODE, HOST, 1, healthy=False)
    leaving = await gateway.engine(Role.DECODE)
    client = await client_of(gateway)
    await change(client, "add", type="prefill", instances=f"{absent.name} 8998")
    with gateway.pools[Role.DECODE].make_lease(PickRequest.make_for_load(Load())):
        await change(client, "remove", type="decode", instances=leaving.name)
        assert [
            (one["role"], one["address"], one["bootstrap_port"], one["membership"], one["state"], one["reason"])
            for one in await shown(client)
        ] == [
            ("prefill", absent.name, 8998, "joining", "unknown", None),
            ("decode", f"{HOST}:1", None, "enabled", "down", "cannot connect (connection refused)"),
            ("decode", leaving.name, None, "draining", "up", "passed its health check"),
        ]
    gateway.prober.remove_drained_backends()
    assert [one["address"] for one in await shown(client)] == [absent.name, f"{HOST}:1"]


async def test_added_instance_waits_for_its_health_check(gateway: Gateway) -> None:
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
        "dry_run": False,
        "changes": [
            {
                "instance": engine.name,
                "was": {"membership": None, "weight": None},
                "becomes": {"membership": "joining", "weight": None},
            }
        ],
        "warnings": [],
        "not_found": [],
        "current_prefill_instances": [],
        "joining_prefill_instances": [],
        "current_decode_instances": [],
        "joining_decode_instances": [engine.name],
    }
    await arrived.wait()
    go_on.set()
    while gateway.joiner.joining_instances(Role.DECODE):  # noqa: ASYNC110 - joining ends without an event
        await asyncio.sleep(0)
    status, told = await change(client, "add", type="decode", instances=[engine.name])
    assert told["message"] == f"add decode instances: ['{engine.name}']."
    assert told["current_decode_instances"] == [engine.name]


@pytest.mark.parametrize("model", ["x", "Qwen/Qwen3-8B"])
async def test_models_of_an_added_instance_may_be_given(gateway: Gateway, model: str) -> None:
    engine = await gateway.engine(None)
    client = await client_of(gateway)
    status, _ = await change(client, "add", type="decode", instances=f"{engine.name} model={model}")
    assert status == 200
    await until(lambda: gateway.pools[Role.DECODE].all_backends(), "the instance to be added")
    assert [one["models"] for one in await shown(client)] == [[model]]


async def test_added_instance_may_have_tls(gateway: Gateway) -> None:
    engine = await gateway.engine(Role.DECODE)
    client = await client_of(gateway)
    for what in ("add", "disable", "enable"):
        status, told = await change(client, what, type="decode", instances=f"https://{engine.name}")
        assert (status, told["not_found"]) == (200, [])
    assert [backend.url for backend in gateway.pools[Role.DECODE].all_backends()] == [f"https://{engine.name}"]


async def test_added_prefiller_may_have_a_bootstrap_port(gateway: Gateway) -> None:
    engine = await gateway.engine(None)
    client = await client_of(gateway)
    status, _ = await change(client, "add", type="prefill", instances=f"{engine.name} 8998")
    assert status == 200
    await until(lambda: gateway.pools[Role.PREFILL].all_backends(), "the instance to be added")
    (backend,) = gateway.pools[Role.PREFILL].all_backends()
    assert (backend.name, backend.bootstrap_port) == (engine.name, 8998)


async def test_idle_instance_is_removed_at_once(gateway: Gateway) -> None:
    engine = await gateway.engine(Role.PREFILL)
    client = await client_of(gateway)
    status, told = await change(client, "remove", type="prefill", instances=[engine.name])
    assert status == 200
    assert told["message"] == f"remove prefill instances: ['{engine.name}']."
    assert told["current_prefill_instances"] == []


async def test_busy_instance_is_removed_after_its_last_request(gateway: Gateway) -> None:
    busy = await gateway.engine(Role.PREFILL)
    client = await client_of(gateway)
    with gateway.pools[Role.PREFILL].make_lease(PickRequest.make_for_load(Load())):
        other = await gateway.engine(Role.PREFILL)
        _, told = await change(client, "remove", type="prefill", instances=busy.name)
        assert told["message"] == f"Instances ['{busy.name}'] are isolated and waiting to be removed."
        assert told["current_prefill_instances"] == [busy.name, other.name]
        assert [backend.name for backend in gateway.pools[Role.PREFILL].eligible_backends()] == [other.name]
    with gateway.pools[Role.PREFILL].make_lease(
        PickRequest.make_for_load(Load())
    ):  # on the other one, which is nothing to the first
        _, told = await change(client, "remove", type="prefill", instances=busy.name)
        assert told["current_prefill_instances"] == [other.name]


@pytest.mark.fault(60)
async def test_removing_a_missing_instance_is_reported(gateway: Gateway, caplog: pytest.LogCaptureFixture) -> None:
    here, stays = await gateway.engine(Role.DECODE), await gateway.engine(Role.DECODE)
    prefiller = await gateway.engine(Role.PREFILL)
    client = await client_of(gateway)
    status, told = await change(client, "remove", type="decode", instances=[here.name, f"{HOST}:1", prefiller.name])
    missing = [f"{HOST}:1", prefiller.name]
    message = f"remove decode instances: ['{here.name}']. There are no decode instances {missing}."
    assert (status, told["message"], told["not_found"], told["warnings"]) == (200, message, missing, [])
    assert told["current_decode_instances"] == [stays.name]
    status, told = await change(client, "remove", type="decode", instances=here.name)
    assert (status, told["message"]) == (200, f"There are no decode instances ['{here.name}'].")
    assert [record.levelname for record in caplog.records if "There are no" in record.getMessage()] == ["WARNING"] * 2


@pytest.mark.fault(60)
async def test_removing_the_last_instance_warns(gateway: Gateway, caplog: pytest.LogCaptureFixture) -> None:
    one, last = await gateway.engine(Role.PREFILL), await gateway.engine(Role.PREFILL)
    client = await client_of(gateway)
    _, told = await change(client, "remove", type="prefill", instances=one.name)
    assert told["warnings"] == []
    with gateway.pools[Role.PREFILL].make_lease(PickRequest.make_for_load(Load())):
        _, told = await change(client, "remove", type="prefill", instances=last.name)
    warning = "No prefill instance is left: requests that need one are rejected until one is added."
    assert told["warnings"] == [warning]
    (line,) = [record for record in caplog.records if warning in record.getMessage()]
    assert line.levelname == "WARNING"


async def test_removing_a_configured_instance_warns(gateway: Gateway) -> None:
    configured, added, stays = [await gateway.engine(Role.DECODE) for _ in range(3)]
    settings = Settings.model_validate({"decode": [f"localhost:{configured.port}", stays.name]})
    client = await client_of(gateway, settings=settings)
    assert [one["configured"] for one in await shown(client)] == [True, False, True]
    _, told = await change(client, "remove", type="decode", instances=[configured.name, added.name])
    assert told["warnings"] == [f"['{configured.name}'] are in the configuration: the next reload adds them again."]


@pytest.mark.fault(61)
async def test_localhost_and_its_address_are_one_instance(gateway: Gateway, names: HostNames) -> None:
    engine, other = await gateway.engine(Role.DECODE), await gateway.engine(Role.DECODE)
    client = await client_of(gateway, names=names)
    for host in ("localhost", "LOCALHOST", "[::ffff:127.0.0.1]"):
        _, told = await change(client, "add", type="decode", instances=f"{host}:{engine.port}")
        assert told["current_decode_instances"] == [engine.name, other.name]
        assert told["joining_decode_instances"] == []
    status, told = await change(client, "add", type="prefill", instances=f"localhost:{engine.port}")
    assert (status, told["error"]["message"]) == (400, f"{engine.name} is already a decode instance")
    _, told = await change(client, "remove", type="decode", instances=f"localhost:{engine.port}")
    assert (told["current_decode_instances"], told["not_found"]) == ([other.name], [])


async def test_joining_instance_can_be_removed(gateway: Gateway) -> None:
    engine = await gateway.engine(None, never)
    client = await client_of(gateway)
    await change(client, "add", type="prefill", instances=engine.name)
    _, told = await change(client, "remove", type="prefill", instances=engine.name)
    assert told["joining_prefill_instances"] == []


async def test_ipv6_endpoint_is_written_in_brackets(gateway: Gateway) -> None:
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
                "https://h:1/",
                "https://h:1/admin",
                "https://https://h:1",
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
async def test_invalid_change_is_rejected(gateway: Gateway, body: object, param: str | None) -> None:
    client = await client_of(gateway)
    for what in ("add", "remove"):
        async with client.post(f"/instances/{what}", json=body) as answer:
            assert answer.status == 400
            error = (await answer.json())["error"]
        assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert gateway.joiner.joining_instances(Role.PREFILL) == []


async def test_invalid_json_is_rejected(gateway: Gateway) -> None:
    client = await client_of(gateway)
    async with client.post("/instances/add", data=b"type=prefill") as answer:
        assert answer.status == 400
        assert (await answer.json())["error"]["code"] == "invalid_json"


async def test_endpoint_cannot_take_the_other_role(gateway: Gateway) -> None:
    engine = await gateway.engine(Role.PREFILL)
    client = await client_of(gateway)
    status, told = await change(client, "add", type="decode", instances=engine.name)
    assert status == 400
    assert told["error"]["message"] == f"{engine.name} is already a prefill instance"


async def test_unused_role_is_rejected(gateway: Gateway) -> None:
    client = await client_of(gateway, roles=[Role.DECODE])
    status, told = await change(client, "add", type="prefill", instances="h:1")
    assert (status, told["error"]["param"]) == (400, "type")


async def test_added_instance_may_be_given_the_engine_key(gateway: Gateway) -> None:
    engine = await gateway.engine(None)
    client = await client_of(gateway, keys=gateway.keys("s3cret"))
    status, _ = await change(client, "add", type="decode", instances=engine.name, send_key=True)
    assert status == 200
    assert [backend.is_trusted for backend in gateway.joiner.joining_instances(Role.DECODE)] == [True]
    status, told = await change(client, "add", type="decode", instances=engine.name, send_key="yes")
    assert (status, told["error"]["param"]) == (400, "send_key")


async def test_adding_an_instance_again_updates_its_details(gateway: Gateway) -> None:
    engine = await gateway.engine(Role.PREFILL)
    client = await client_of(gateway)
    was: dict[str, object] = {"bootstrap_port": None, "models": [], "send_key": False}
    becomes = {"bootstrap_port": 8998, "models": ["x"], "send_key": True}
    said = {"type": "prefill", "instances": f"{engine.name} 8998 model=x", "send_key": True}
    for path in ("add?dry_run=true", "add"):
        _, told = await change(client, path, **said)
        assert told["changes"] == [{"instance": engine.name, "was": was, "becomes": becomes}]
        assert told["message"].endswith(f"['{engine.name}'] exist already; their details are updated.")
    _, told = await change(client, "add", type="prefill", instances=engine.name)  # what is not said stays
    assert (told["changes"], told["message"]) == ([], f"add prefill instances: ['{engine.name}'].")
    (backend,) = gateway.pools[Role.PREFILL].all_backends()
    assert (backend.bootstrap_port, backend.models, backend.is_trusted) == (8998, ("x",), True)


async def test_other_details_of_a_joining_instance_are_ignored_with_a_warning(gateway: Gateway) -> None:
    engine = await gateway.engine(None, never)
    client = await client_of(gateway)
    for send_key, warnings in (
        (False, []),
        (False, []),
        (True, [f"['{engine.name}'] are waiting with other details: remove them first to change these."]),
    ):
        _, told = await change(client, "add", type="decode", instances=engine.name, send_key=send_key)
        assert told["warnings"] == warnings
    assert [backend.is_trusted for backend in gateway.joiner.joining_instances(Role.DECODE)] == [False]


@pytest.fixture
async def names(gateway: Gateway) -> AsyncIterator[HostNames]:
    """Run a name server with a few names."""
    known: dict[str, tuple[str, ...]] = {
        "inside": ("10.0.0.7",),
        "metadata": ("169.254.169.254",),
        "world": ("93.184.216.34",),
    }
    known["localhost"] = ("127.0.0.1", "::1")

    def look_up(host: str) -> tuple[str, ...]:
        if host not in known:
            raise OSError(errno.ENOENT, "")
        return known[host]

    async with HostNames(RULES, (), gateway.metrics, look_up=look_up) as names:
        yield names


@pytest.mark.parametrize(
    "host",
    [
        *("169.254.169.254", "224.0.0.1", "0.0.0.0", "255.255.255.255", "93.184.216.34"),
        *("[fe80::1]", "[::]", "[ff02::1]", "[2001:db8::1]", "[::ffff:169.254.169.254]"),
        *("2130706433", "0x7f.1", "127.1", "0177.0.0.1", "0x7f000001"),
        *("100.100.100.200", "[fd00:ec2::254]", "[::ffff:100.100.100.200]", "[fd00::169.254.169.254]"),
        *("metadata", "world", "nowhere"),
    ],
)
async def test_instance_outside_the_allowed_networks_is_rejected(gateway: Gateway, names: HostNames, host: str) -> None:
    client = await client_of(gateway, names=names)
    status, told = await change(client, "add", type="decode", instances=[f"{HOST}:1", f"{host}:80"])
    assert (status, told["error"]["code"], told["error"]["param"]) == (400, "address_not_allowed", "instances")
    assert "169.254" not in told["error"]["message"].replace(host, "")
    assert "93.184" not in told["error"]["message"].replace(host, "")
    assert gateway.joiner.joining_instances(Role.DECODE) == []


@pytest.mark.parametrize("host", ["inside", "10.1.2.3", "[fd00::1]", "100.64.0.1"])
async def test_instance_in_an_allowed_network_is_added(gateway: Gateway, names: HostNames, host: str) -> None:
    client = await client_of(gateway, names=names)
    status, told = await change(client, "add", type="decode", instances=f"{host}:80")
    assert (status, told["joining_decode_instances"]) == (200, [f"{host}:80"])


@pytest.mark.parametrize("path", ["/instances/add", "/instances/remove"])
async def test_long_body_is_rejected(gateway: Gateway, path: str) -> None:
    client = await client_of(gateway)
    async with client.post(path, data=b" " * (64 * 1024 + 1)) as answer:
        assert answer.status == 413
        assert "max_body_bytes" not in await answer.text()  # which would not help
