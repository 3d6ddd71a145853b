"""The EndpointSlices of one role, listed once and watched from then on."""

from __future__ import annotations

from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from proxy.common.backend import Backend, Role
from proxy.fleet.discovery.kubernetes.api_server import ApiServer
from proxy.fleet.discovery.kubernetes.slices import instances

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterator, Sequence

    from proxy.settings import Settings

_SLICES: Final = "discovery.k8s.io/v1/endpointslices"


@dataclass(frozen=True, slots=True)
class WatchedSlices:
    """`port_name`: see the option."""

    role: Role
    selector: str
    server: ApiServer
    port_name: str | None

    @property
    def name(self) -> str:
        """There is one for each role."""
        return self.role

    async def watch(self) -> AsyncGenerator[Sequence[Backend], None]:
        """See Source."""
        async with (
            self.server.collection(_SLICES, self.selector) as collection,
            aclosing(collection.states()) as states,
        ):
            async for slices in states:
                yield instances(self.role, slices.values(), self.port_name)


def watched_slices(settings: Settings) -> Iterator[WatchedSlices]:
    """Those of the settings."""
    options = settings.kubernetes
    server = ApiServer(options.api_server, options.token_file, options.ca_file, options.namespace)
    for role, selector in options.selectors.items():
        yield WatchedSlices(Role(role), selector, server, options.port_name)
