"""Instances by DNS: the addresses of a name, or the hosts and ports of its SRV records (RFC 2782).

A name is resolved again when its records expire. A missing name or address is a failure like any other, because a name
server that has lost its zone answers the same. Health checks find instances that are really gone.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from proxy.common.backend import Backend, Role
from proxy.settings import DnsName, Settings, parse_dns_name, parse_endpoints, strip_host_brackets

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterator, Sequence

    from dns.asyncresolver import Resolver
    from dns.resolver import Answer


_TIMEOUT_SECONDS: Final = 5.0


@dataclass(frozen=True, slots=True)
class LookedUpName:
    """One name. A Source.

    servers: Address and port of each name server; empty: those of the system.
    min_seconds, max_seconds: Bounds of the time between two look-ups.
    """

    role: Role
    source_name: str
    dns_servers: tuple[str, ...]
    min_pause_seconds: float
    max_pause_seconds: float
    timeout_seconds: float = _TIMEOUT_SECONDS

    async def watch_instances(self) -> AsyncGenerator[Sequence[Backend], None]:
        name = parse_dns_name(self.source_name)
        while True:
            resolver = self._make_resolver()  # for each look-up, because the system's servers may change
            backends, expires_seconds = await _look_up(resolver, self.role, name)
            yield backends
            await asyncio.sleep(self.pause_seconds(expires_seconds))

    def pause_seconds(self, expires_seconds: float) -> float:
        """Return the time from a look-up to the next one, if its records expire after `expires_seconds`."""
        return min(max(expires_seconds, self.min_pause_seconds), self.max_pause_seconds)

    def _make_resolver(self) -> Resolver:
        # An optional dependency that is slow to import.
        from dns.asyncresolver import Resolver
        from dns.nameserver import Do53Nameserver

        resolver = Resolver(configure=not self.dns_servers)
        resolver.lifetime = self.timeout_seconds
        if self.dns_servers:
            servers = [endpoint for text in self.dns_servers for endpoint in parse_endpoints(text)]
            resolver.nameservers = [Do53Nameserver(server.host, server.port) for server in servers]
        return resolver


def looked_up_names(settings: Settings) -> Iterator[LookedUpName]:
    """Return the sources of this kind in the settings."""
    options = settings.discovery
    roles = ((Role.PREFILL, options.prefill_dns), (Role.DECODE, options.decode_dns), (Role.ENCODE, options.encode_dns))
    for role, names in roles:
        for name in names:
            yield LookedUpName(role, name, options.dns_servers, options.dns_min_seconds, options.dns_max_seconds)


async def _look_up(resolver: Resolver, role: Role, name: DnsName) -> tuple[list[Backend], float]:
    """Return the instances of a name, and the seconds until its records expire.

    Raises dns.exception.DNSException, or ValueError for records that name no host.
    """
    if name.ports is None:
        answer = await resolver.resolve(name.name, "SRV", search=True)
        places = _hosts_and_ports_of(answer)
    else:
        answer = await _look_up_addresses(resolver, name.name)
        places = {(record.address, port) for record in answer for port in name.ports}
    backends = [
        Backend(role, host, port, is_trusted=True, bootstrap_port=name.bootstrap_port, models=name.models, tls=name.tls)
        for host, port in sorted(places)
    ]
    return backends, answer.chaining_result.minimum_ttl


async def _look_up_addresses(resolver: Resolver, host_name: str) -> Answer:
    """Return the records of one address family, because an engine with both kinds of addresses is one instance."""
    answer = await resolver.resolve(host_name, "A", search=True, raise_on_no_answer=False)
    if answer.rrset is None:
        answer = await resolver.resolve(host_name, "AAAA", search=True)
    return answer


def _hosts_and_ports_of(srv_answer: Answer) -> set[tuple[str, int]]:
    """Return the hosts and ports of the lowest, preferred `priority`; none for the target `.` (no service)."""
    highest = min(record.priority for record in srv_answer)
    first = [record for record in srv_answer if record.priority == highest]
    hosts = [(record.target.to_text(omit_final_dot=True), record.port) for record in first]
    return {(strip_host_brackets(host), port) for host, port in hosts if host != "."}
