"""Publishers of instance lists: a file, a name server and an API server, which can also fail."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import dns.rcode
import pytest
import yaml

from proxy.common.backend import Role
from proxy.fleet.discovery.files import WatchedFiles
from proxy.fleet.discovery.kubernetes import WatchedSlices, watched_slices
from proxy.fleet.discovery.sources import SOURCES
from proxy.settings import Settings
from proxy.sim.engine import SimulatedEngine
from tests.fleet.discovery.kubernetes_server import NAMESPACE, KubernetesServer, endpoint_slice, gone
from tests.fleet.discovery.name_server import NameServer
from tests.fleet.discovery.test_files import replace_file


class Keeper(Protocol):
    """A publisher of instances. `settings`: sections of the gateway's settings that make it read them."""

    settings: dict[str, Any]

    def publish(self, *engines: SimulatedEngine) -> None:
        """Publish these instances, and repair the effect of `fail`."""

    def fail(self, turn: int) -> None:
        """Break the list. The way of failure depends on `turn`."""


class FileKeeper:
    def __init__(self, path: Path) -> None:
        self._path = path
        self.settings = {"discovery": {"files": [str(path)]}}

    def publish(self, *engines: SimulatedEngine) -> None:
        replace_file(self._path, groups(*engines))

    def fail(self, turn: int) -> None:
        if turn % 2:
            self._path.unlink()
        else:
            self._path.write_text("- targets: [", encoding="utf-8")


def groups(*engines: SimulatedEngine) -> str:
    """Return the contents of a file that lists the engines."""
    listed = [
        {"targets": [f"{engine.host}:{engine.port}"], "labels": {"role": engine.options.role}} for engine in engines
    ]
    return yaml.safe_dump(listed)


class DnsKeeper:
    """Publishes SRV records: a service for each role."""

    def __init__(self, server: NameServer) -> None:
        self._server = server
        self.settings = {
            "discovery": {
                "prefill_dns": ["_http._tcp.prefill.test"],
                "decode_dns": ["_http._tcp.decode.test"],
                "dns_servers": [server.address],
                "dns_min_seconds": 0.02,
            }
        }

    def publish(self, *engines: SimulatedEngine) -> None:
        self._server.failure = None
        for role in (Role.PREFILL, Role.DECODE):
            records = [f"0 0 {engine.port} localhost." for engine in engines if engine.options.role == role]
            self._server.set_records(f"_http._tcp.{role}.test", "SRV", *records)

    def fail(self, turn: int) -> None:
        self._server.failure = dns.rcode.NXDOMAIN if turn % 2 else dns.rcode.SERVFAIL


def impatient(settings: Settings) -> Iterator[WatchedSlices]:
    """Yield the sources of the settings, without a pause between two watches."""
    for source in watched_slices(settings):
        yield replace(source, api_server=replace(source.api_server, pause_seconds=0.001))


class KubernetesKeeper:
    """Publishes a slice for each engine, because ports differ, and a service for each role."""

    def __init__(self, server: KubernetesServer) -> None:
        self._server = server
        self._names: set[str] = set()
        self.settings = {
            "kubernetes": {
                "prefill_selector": "kubernetes.io/service-name=prefill",
                "decode_selector": "kubernetes.io/service-name=decode",
                "namespace": NAMESPACE,
                "api_server": server.url,
            }
        }

    def publish(self, *engines: SimulatedEngine) -> None:
        self._server.refusal = None
        wanted = {f"{engine.options.role}-{engine.port}": engine for engine in engines}
        for name in wanted.keys() - self._names:
            engine = wanted[name]
            labels = {"kubernetes.io/service-name": str(engine.options.role)}
            self._server.put(endpoint_slice(name, engine.host, port=engine.port, labels=labels))
        for name in self._names - wanted.keys():
            self._server.delete(name)
        self._names = {*wanted}

    def fail(self, turn: int) -> None:
        self._server.refusal = 503, "the server is currently unable to handle the request"
        self._server.end_watches({"kind": "Status", "code": 500, "message": "no leader"} if turn % 2 else gone())


@asynccontextmanager
async def keeper(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Keeper]:
    """Run a publisher for sources of one kind, which then check for changes often."""
    if kind == "file":
        monkeypatch.setitem(SOURCES, "file", lambda new: [WatchedFiles(path, 0.02) for path in new.discovery.files])
        yield FileKeeper(tmp_path / "engines.yaml")
    elif kind == "dns":
        async with NameServer() as server:
            yield DnsKeeper(server)
    else:
        monkeypatch.setitem(SOURCES, "kubernetes", impatient)
        async with KubernetesServer() as server:
            yield KubernetesKeeper(server)
