"""Instances by DNS, asked of a real name server (in this process; scripts/test-dns takes Knot)."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import replace

import dns.rcode
import pytest
from dns.exception import DNSException

from proxy.common.backend import Role
from proxy.fleet.discovery.dns_names import LookedUpName
from proxy.settings import parse_dns_name
from tests.fleet.discovery.name_server import NameServer
from tests.fleet.discovery.test_files import names_of

SERVICE = "_http._tcp.decode.test"


@pytest.fixture
async def server() -> AsyncIterator[NameServer]:
    async with NameServer() as server:
        yield server


def source(
    server: NameServer, name: str, role: Role = Role.DECODE, min_seconds: float = 0.001, max_seconds: float = 9.0
) -> LookedUpName:
    return LookedUpName(role, name, (server.address,), min_seconds, max_seconds)


async def named(server: NameServer, name: str, role: Role = Role.DECODE) -> list[str]:
    async with aclosing(source(server, name, role).watch_instances()) as found:
        return names_of(await anext(found))


@pytest.mark.parametrize(
    ("text", "name", "ports", "bootstrap_port"),
    [
        ("Decode.test:7100", "decode.test", (7100,), None),
        ("decode.test:7100-7102", "decode.test", (7100, 7101, 7102), None),
        ("prefill.test:30000 8998", "prefill.test", (30000,), 8998),
        ("_http._tcp.prefill.test", "_http._tcp.prefill.test", None, None),
        ("_http._tcp.prefill.test 8998", "_http._tcp.prefill.test", None, 8998),
    ],
)
def test_dns_name_format_selects_the_record_type(
    text: str, name: str, ports: tuple[int, ...] | None, bootstrap_port: int | None
) -> None:
    found = parse_dns_name(text)
    assert (found.name, found.ports, found.bootstrap_port) == (name, ports, bootstrap_port)
    assert parse_dns_name(f"{text} model=x") == replace(found, models=("x",))


async def test_each_address_is_an_instance_on_each_port(server: NameServer) -> None:
    server.set_records("decode.test", "A", "10.0.0.2", "10.0.0.1")
    server.set_records("decode.test", "AAAA", "fd00::1")
    assert await named(server, "decode.test:1-2") == [
        *("decode 10.0.0.1:1", "decode 10.0.0.1:2"),
        *("decode 10.0.0.2:1", "decode 10.0.0.2:2"),
    ]
    server.set_records("decode.test", "A")
    assert await named(server, "decode.test:1") == ["decode [fd00::1]:1"]


async def test_srv_records_of_the_highest_priority_give_hosts_and_ports(server: NameServer) -> None:
    server.set_records(SERVICE, "SRV", "10 5 7200 D-1.test.", "20 5 7300 spare.test.", "10 50 7201 d-0.test.")
    assert await named(server, SERVICE) == ["decode d-0.test:7201", "decode d-1.test:7200"]
    assert await named(server, f"{SERVICE} 8998", Role.PREFILL) == [
        "prefill d-0.test:7201 8998",
        "prefill d-1.test:7200 8998",
    ]
    server.set_records(SERVICE, "SRV", "0 0 0 .")
    assert await named(server, SERVICE) == []


async def test_truncated_answer_is_requested_over_tcp(server: NameServer) -> None:
    hosts = [f"decode-{number:03}.a-name-of-some-length.test" for number in range(100)]
    server.set_records(SERVICE, "SRV", *(f"0 0 7100 {host}." for host in hosts))
    assert await named(server, SERVICE) == [f"decode {host}:7100" for host in hosts]
    assert server.over_tcp == 1


async def test_name_is_looked_up_again_when_its_records_expire(server: NameServer) -> None:
    server.set_records("alias.test", "CNAME", "decode.test.", ttl=0)
    server.set_records("decode.test", "A", "10.0.0.1", ttl=3600)
    async with aclosing(source(server, "alias.test:1").watch_instances()) as found:
        assert names_of(await anext(found)) == ["decode 10.0.0.1:1"]
        server.set_records("decode.test", "A", "10.0.0.1", "10.0.0.2", ttl=3600)
        assert names_of(await anext(found)) == ["decode 10.0.0.1:1", "decode 10.0.0.2:1"]


@pytest.mark.parametrize(("ttl", "pause_seconds"), [(0, 5.0), (30, 30.0), (3600, 60.0)])
def test_lookup_interval_is_bounded_for_any_record_lifetime(ttl: int, pause_seconds: float) -> None:
    name = LookedUpName(Role.DECODE, "decode.test:1", (), min_pause_seconds=5.0, max_pause_seconds=60.0)
    assert name.pause_seconds(ttl) == pause_seconds


async def test_long_lived_record_is_looked_up_again_after_the_maximum(server: NameServer) -> None:
    server.set_records("decode.test", "A", "10.0.0.1", ttl=3600)
    async with aclosing(source(server, "decode.test:1", max_seconds=0.001).watch_instances()) as found:
        for _ in range(3):
            await anext(found)
    assert server.asked["decode.test", "A"] == 3


@pytest.mark.parametrize("name", ["decode.test:1", SERVICE])
@pytest.mark.parametrize("what", ["no name", "no records", "SERVFAIL", "REFUSED"])
async def test_no_answer_is_a_failure_and_not_an_empty_list(server: NameServer, name: str, what: str) -> None:
    if what == "no records":
        server.set_records("decode.test", "TXT")
        server.set_records(SERVICE, "TXT")
    elif what != "no name":
        server.failure = dns.rcode.from_text(what)
    with pytest.raises(DNSException, match=r"decode\.test"):
        await named(server, name)


async def test_silent_name_server_is_a_failure(server: NameServer) -> None:
    server.is_silent = True
    async with aclosing(replace(source(server, "decode.test:1"), timeout_seconds=0.05).watch_instances()) as found:
        with pytest.raises(DNSException, match="timed out"):
            await anext(found)
