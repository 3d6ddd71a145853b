"""Instances from EndpointSlices of Kubernetes: their contents, and how they are listed and watched."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from proxy.common.backend import Role
from proxy.fleet.discovery.kubernetes import (
    BOOTSTRAP_KEY,
    ELASTIC_KEY,
    MODEL_KEY,
    ApiServer,
    ApiServerError,
    WatchedSlices,
    ready_instances,
)
from tests.asking import until
from tests.fleet.discovery.kubernetes_server import NAMESPACE, KubernetesServer, endpoint_slice, gone
from tests.fleet.discovery.test_files import names_of


def endpoint(address: str, uid: str | None = None, **conditions: bool) -> dict[str, Any]:
    target = {} if uid is None else {"targetRef": {"kind": "Pod", "uid": uid}}
    return {"addresses": [address], "conditions": conditions, **target}


def named(*slices: dict[str, Any], role: Role = Role.DECODE, port_name: str | None = None) -> list[str]:
    return names_of(ready_instances(role, slices, port_name))


# Contents of slices


@pytest.mark.parametrize(
    ("endpoints", "expected"),
    [
        (None, []),
        ([endpoint("10.0.0.1", ready=True), endpoint("10.0.0.2", ready=False)], ["decode 10.0.0.1:8000"]),
        ([{"addresses": ["10.0.0.1"]}], ["decode 10.0.0.1:8000"]),
        (
            [endpoint("10.0.0.1", ready=False), endpoint("10.0.0.2", ready=False, serving=True, terminating=True)],
            ["decode 10.0.0.1:8000"],
        ),
        ([endpoint("10.0.0.1", ready=True, terminating=True)], []),
    ],
    ids=["none", "one is not ready", "nothing is known", "none is ready", "it terminates"],
)
def test_only_ready_endpoints_that_are_not_terminating_are_instances(endpoints: Any, expected: list[str]) -> None:
    assert named(endpoint_slice("d", endpoints=endpoints)) == expected


def test_pod_with_two_addresses_or_in_two_slices_is_one_instance() -> None:
    four = endpoint_slice("a", endpoints=[endpoint("10.0.0.1", "u1"), endpoint("10.0.0.2", "u2")])
    six = endpoint_slice("b", endpoints=[endpoint("fd00::1", "u1"), endpoint("fd00::3", "u3")], addressType="IPv6")
    moving = endpoint_slice("c", endpoints=[endpoint("10.0.0.2", "u2")])
    assert named(six, four, moving) == ["decode 10.0.0.1:8000", "decode 10.0.0.2:8000", "decode [fd00::3]:8000"]


@pytest.mark.parametrize(
    ("ports", "port_name", "expected"),
    [
        ({"": 1}, None, [1]),
        ({"api": 1}, None, [1]),
        ({"api": 1, "bootstrap": 2}, None, [1]),
        ({"api": 1, "http": 2}, None, [2]),
        ({"api": 1, "metrics": 2}, "api", [1]),
        ({"rank-0": 1, "rank-1": 2, "metrics": 3}, "rank-*", [1, 2]),
    ],
)
def test_configured_port_name_selects_the_engine_port(
    ports: dict[str, int], port_name: str | None, expected: list[int]
) -> None:
    listed = [{"name": name, "port": port} for name, port in ports.items()]
    assert named(endpoint_slice("d", "h", ports=listed), port_name=port_name) == [
        f"decode h:{port}" for port in expected
    ]


@pytest.mark.parametrize(("ports", "port_name"), [({"a": 1, "b": 2}, None), ({"a": 1}, "http"), ({}, None)])
def test_error_lists_the_ports_when_the_engine_port_is_ambiguous(ports: dict[str, int], port_name: str | None) -> None:
    listed = [{"name": name, "port": port} for name, port in ports.items()]
    with pytest.raises(ValueError, match="EndpointSlice d: no port is clearly that of engines"):
        named(endpoint_slice("d", "h", ports=listed), port_name=port_name)


@pytest.mark.parametrize(
    "more",
    [
        {"ports": [{"name": "http", "port": 8000}, {"name": "bootstrap", "port": 8998}]},
        {"metadata": {"name": "p", "annotations": {BOOTSTRAP_KEY: "8998"}}},
        {"metadata": {"name": "p", "labels": {BOOTSTRAP_KEY: "8998"}}},
    ],
    ids=["port", "annotation", "label"],
)
def test_prefillers_take_the_bootstrap_port_of_their_slice(more: dict[str, Any]) -> None:
    assert named(endpoint_slice("p", "h", **more), role=Role.PREFILL) == ["prefill h:8000 8998"]
    assert named(endpoint_slice("p", "h", **more)) == ["decode h:8000"]


def test_invalid_bootstrap_port_is_rejected() -> None:
    wrong = endpoint_slice("p", "h", metadata={"name": "p", "annotations": {BOOTSTRAP_KEY: "x"}})
    with pytest.raises(ValueError, match=f"{BOOTSTRAP_KEY} of EndpointSlice p must be a port"):
        named(wrong, role=Role.PREFILL)


@pytest.mark.parametrize("where", ["annotations", "labels"])
def test_slice_annotation_makes_endpoints_elastic(where: str) -> None:
    elastic = endpoint_slice("d", "h", metadata={"name": "d", where: {ELASTIC_KEY: "true"}})
    found = [ready_instances(Role.DECODE, [one], None) for one in (elastic, endpoint_slice("d", "h"))]
    assert [backend.is_elastic for backends in found for backend in backends] == [True, False]


@pytest.mark.parametrize("where", ["annotations", "labels"])
def test_slice_annotation_names_the_models_of_its_endpoints(where: str) -> None:
    said = endpoint_slice("d", "h", metadata={"name": "d", where: {MODEL_KEY: "x,y"}})
    assert [backend.models for backend in ready_instances(Role.DECODE, [said], None)] == [("x", "y")]
    assert [backend.models for backend in ready_instances(Role.DECODE, [endpoint_slice("d", "h")], None)] == [()]
    wrong = endpoint_slice("d", "h", metadata={"name": "d", where: {MODEL_KEY: "x" * 300}})
    with pytest.raises(ValueError, match=f"{MODEL_KEY} of EndpointSlice d: the names"):
        ready_instances(Role.DECODE, [wrong], None)


# Listing and watching


@pytest.fixture
async def server() -> AsyncIterator[KubernetesServer]:
    async with KubernetesServer() as server:
        yield server


def source(server: KubernetesServer, **options: Any) -> WatchedSlices:
    api = replace(ApiServer(server.url, None, None, NAMESPACE, pause_seconds=0.001), **options)
    return WatchedSlices(Role.DECODE, "kubernetes.io/service-name=decode", api, None)


def decode_slice(name: str, *addresses: str) -> dict[str, Any]:
    return endpoint_slice(name, *addresses, labels={"kubernetes.io/service-name": "decode"})


async def test_watch_delivers_changes_without_another_list(server: KubernetesServer) -> None:
    server.put(decode_slice("d-1", "10.0.0.1"))
    server.put(endpoint_slice("prefill", "10.0.9.1"))
    async with aclosing(source(server).watch_instances()) as found:
        assert names_of(await anext(found)) == ["decode 10.0.0.1:8000"]
        server.put(decode_slice("d-2", "10.0.0.2"))
        assert names_of(await anext(found)) == ["decode 10.0.0.1:8000", "decode 10.0.0.2:8000"]
        server.put(decode_slice("d-1", "10.0.0.3"))
        assert names_of(await anext(found)) == ["decode 10.0.0.3:8000", "decode 10.0.0.2:8000"]
        server.delete("d-2")
        assert names_of(await anext(found)) == ["decode 10.0.0.3:8000"]
    assert (server.lists, server.watches) == (1, ["102"])
    await until(lambda: not server.watching, "the watch to be left")


async def test_long_lists_are_paged_and_long_events_reassembled(server: KubernetesServer) -> None:
    server.page = 2
    for number in range(5):
        server.put(decode_slice(f"d-{number}", f"10.0.0.{number}"))
    async with aclosing(source(server).watch_instances()) as found:
        assert len(await anext(found)) == 5
        assert server.lists == 3
        addresses = [f"10.1.{high}.{low}" for high in range(40) for low in range(250)]
        server.put(decode_slice("large", *addresses))
        assert len(await anext(found)) == 5 + len(addresses)


async def test_watch_continues_from_the_last_bookmark_after_its_end(server: KubernetesServer) -> None:
    server.put(decode_slice("d-1", "10.0.0.1"))
    async with aclosing(source(server).watch_instances()) as found:
        await anext(found)
        server.put(decode_slice("d-1", "10.0.0.2"))
        await anext(found)
        server.bookmark()
        server.forget()
        server.end_watches()
        server.put(decode_slice("d-1", "10.0.0.3"))
        assert names_of(await anext(found)) == ["decode 10.0.0.3:8000"]
    assert (server.lists, server.watches) == (1, ["101", "112"])


@pytest.mark.parametrize("how", ["status", "event"])
async def test_instances_are_listed_again_when_the_version_has_expired(server: KubernetesServer, how: str) -> None:
    server.put(decode_slice("d-1", "10.0.0.1"))
    async with aclosing(source(server).watch_instances()) as found:
        await anext(found)
        server.put(decode_slice("d-1", "10.0.0.2"))
        await anext(found)
        server.end_watches(gone() if how == "event" else None)
        server.delete("d-1")
        server.put(decode_slice("d-2", "10.0.0.3"))
        server.forget()
        assert names_of(await anext(found)) == ["decode 10.0.0.3:8000"]
        assert server.lists == 2
        server.put(decode_slice("d-2", "10.0.0.4"))
        assert names_of(await anext(found)) == ["decode 10.0.0.4:8000"]


async def test_error_in_a_watch_is_a_failure(server: KubernetesServer) -> None:
    async with aclosing(source(server).watch_instances()) as found:
        assert list(await anext(found)) == []
        server.put(decode_slice("d", "10.0.0.1"))
        await anext(found)
        server.end_watches({"kind": "Status", "code": 500, "message": "etcdserver: no leader"})
        with pytest.raises(ApiServerError, match=r"^the API server answered 500: etcdserver: no leader$"):
            await anext(found)


async def test_error_quotes_the_message_of_the_api_server(server: KubernetesServer) -> None:
    server.refusal = 403, 'endpointslices is forbidden: User "pdproxy" cannot list resource'
    with pytest.raises(ApiServerError, match=r"^the API server answered 403: endpointslices is forbidden"):
        async with aclosing(source(server).watch_instances()) as found:
            await anext(found)


async def test_token_file_is_read_for_each_request(server: KubernetesServer, tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("one\n", encoding="utf-8")
    server.token = "one"
    async with aclosing(source(server, token_file=file).watch_instances()) as found:
        await anext(found)
        server.put(decode_slice("d", "10.0.0.1"))
        await anext(found)
        server.token = "two"
        file.write_text("two\n", encoding="utf-8")
        server.end_watches()
        server.put(decode_slice("d", "10.0.0.2"))
        assert names_of(await anext(found)) == ["decode 10.0.0.2:8000"]
    file.unlink()
    with pytest.raises(ApiServerError, match="token cannot be read: no such file or directory"):
        async with aclosing(source(server, token_file=file).watch_instances()) as found:
            await anext(found)


async def test_error_names_the_cause_outside_of_a_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    pod = WatchedSlices(Role.DECODE, "a=b", ApiServer(None, None, None, None), None)
    with pytest.raises(ApiServerError, match=r"not run in a pod of Kubernetes: set kubernetes\.api_server"):
        async with aclosing(pod.watch_instances()) as found:
            await anext(found)


@pytest.mark.fault(111)
async def test_endless_paging_is_a_failure(server: KubernetesServer) -> None:
    server.is_endless = True
    server.put(decode_slice("d", "10.0.0.1"))
    async with aclosing(source(server).watch_instances()) as found:
        with pytest.raises(ApiServerError, match="more than 200 pages"):
            await anext(found)


@pytest.mark.fault(111)
async def test_too_many_objects_are_a_failure(server: KubernetesServer) -> None:
    for number in range(10_001):
        server.put(decode_slice(f"d{number}"))
    async with aclosing(source(server).watch_instances()) as found:
        with pytest.raises(ApiServerError, match="more than 200 pages"):
            await anext(found)


@pytest.mark.fault(111)
async def test_simultaneous_changes_are_yielded_together(server: KubernetesServer) -> None:
    server.put(decode_slice("d", "10.0.0.1"))
    async with aclosing(source(server).watch_instances()) as found:
        await anext(found)
        following = asyncio.ensure_future(anext(found))
        await until(lambda: server.watching, "the watch")
        for number in range(1000):
            server.put(decode_slice(f"e{number % 100}", f"10.0.1.{number % 100 + 1}"))
        states = 0
        while len(await following) < 101:
            states += 1
            following = asyncio.ensure_future(anext(found))
    assert states < 200
