"""Instances by DNS: the addresses of a name, or the hosts and ports of its SRV records (RFC 2782).

A name is looked up again when its records expire. That there is none, or no address, is a failure like any other: a
name server that has lost its zone says the same, and whoever has really gone is found out by health checks.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from proxy.common.backend import Backend, Role
from proxy.settings import parse_dns_name, parse_endpoints, plain_host

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterator, Sequence

    from dns.asyncresolver import Resolver
    from dns.resolver import Answer

    from proxy.settings import DnsName, Settings

_TIMEOUT_SECONDS: Final = 5.0


@dataclass(frozen=True, slots=True)
class LookedUpName:
    """One name. `servers`: address and port of each; empty: those of the system."""

    role: Role
    name: str
    servers: tuple[str, ...]
    min_seconds: float
    max_seconds: float
    timeout_seconds: float = _TIMEOUT_SECONDS

    async def watch(self) -> AsyncGenerator[Sequence[Backend], None]:
        """See Source."""
        wanted = parse_dns_name(self.name)
        while True:
            resolver = self._resolver()  # anew: the system's may change
            backends, expires_seconds = await _look_up(resolver, self.role, wanted)
            yield backends
            await asyncio.sleep(self.pause_seconds(expires_seconds))

    def pause_seconds(self, expires_seconds: float) -> float:
        """From a look-up to the next, when its records expire after so many seconds."""
        return min(max(expires_seconds, self.min_seconds), self.max_seconds)

    def _resolver(self) -> Resolver:
        # An extra, and slow to import.
        from dns.asyncresolver import Resolver
        from dns.nameserver import Do53Nameserver

        resolver = Resolver(configure=not self.servers)
        resolver.lifetime = self.timeout_seconds
        if self.servers:
            servers = [endpoint for text in self.servers for endpoint in parse_endpoints(text)]
            resolver.nameservers = [Do53Nameserver(server.host, server.port) for server in servers]
        return resolver


def looked_up_names(settings: Settings) -> Iterator[LookedUpName]:
    """Those of the settings."""
    options = settings.discovery
    roles = ((Role.PREFILL, options.prefill_dns), (Role.DECODE, options.decode_dns), (Role.ENCODE, options.encode_dns))
    for role, names in roles:
        for name in names:
            yield LookedUpName(role, name, options.dns_servers, options.dns_min_seconds, options.dns_max_seconds)


async def _look_up(resolver: Resolver, role: Role, wanted: DnsName) -> tuple[list[Backend], float]:
    """The instances, and after how many seconds they may be others. Raises dns.exception.DNSException, or ValueError
    for records that name no host.
    """
    if wanted.ports is None:
        answer = await resolver.resolve(wanted.name, "SRV", search=True)
        places = _of_services(answer)
    else:
        answer = await _addresses(resolver, wanted.name)
        places = {(record.address, port) for record in answer for port in wanted.ports}
    backends = [
        Backend(role, host, port, trusted=True, bootstrap_port=wanted.bootstrap_port, models=wanted.models)
        for host, port in sorted(places)
    ]
    return backends, answer.chaining_result.minimum_ttl


async def _addresses(resolver: Resolver, name: str) -> Answer:
    """Of one family: an engine that has both kinds of addresses is one instance."""
    answer = await resolver.resolve(name, "A", search=True, raise_on_no_answer=False)
    if answer.rrset is None:
        answer = await resolver.resolve(name, "AAAA", search=True)
    return answer


def _of_services(answer: Answer) -> set[tuple[str, int]]:
    """Of the highest priority, whose number is the lowest; none if the service is said not to be there (target `.`)."""
    highest = min(record.priority for record in answer)
    first = [record for record in answer if record.priority == highest]
    hosts = [(record.target.to_text(omit_final_dot=True), record.port) for record in first]
    return {(plain_host(host), port) for host, port in hosts if host != "."}
