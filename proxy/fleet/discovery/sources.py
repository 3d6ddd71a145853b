"""Sources of instances: the interface, the kinds, and the instances of the configuration.

A new kind of source is one module here and one entry in SOURCES. The supervisor imports this module before it forks, so
it imports no HTTP client.
"""

from __future__ import annotations

import pkgutil
from collections.abc import AsyncGenerator, Callable, Collection, Iterable
from typing import TYPE_CHECKING, Final, Protocol, TypeAlias

from proxy.common.backend import Backend, Role
from proxy.fleet.discovery.dns_names import looked_up_names
from proxy.fleet.discovery.files import WatchedFiles

if TYPE_CHECKING:
    from proxy.settings import Settings

Instances: TypeAlias = Collection[Backend]
"""All instances of a source, of all roles. The gateway sends its engine key to `trusted` ones. Their addresses must be
inside `admin.networks`, unless the configuration names them, too. Slots do not count."""


class DiscoverySource(Protocol):
    """A source that fails as a whole, such as one file or one DNS name.

    A reload does not restart a source that equals its predecessor; a frozen dataclass of the options compares so.
    """

    @property
    def source_name(self) -> str:
        """The name among sources of the same kind, as in the settings."""

    def watch_instances(self) -> AsyncGenerator[Instances, None]:
        """Yield all instances, at once and after each change.

        The last result holds until the next one. A problem is raised, and the watcher begins again, soon and then every
        few seconds. To end without an exception means that there will be no more changes.
        """


MakeSources: TypeAlias = "Callable[[Settings], Iterable[DiscoverySource]]"
"""Returns the sources of one kind in the settings, with different names. It neither waits nor fails."""

SOURCES: Final[dict[str, MakeSources]] = {
    "file": lambda settings: map(WatchedFiles, settings.discovery.files),
    "dns": looked_up_names,
    # Imported by name at its first use, because importing aiohttp would delay the program's first output.
    "kubernetes": lambda settings: pkgutil.resolve_name("proxy.fleet.discovery.kubernetes:watched_slices")(settings),
}
"""Sources by kind. Instances of a source have the origin `kind:name`."""


def configured_instances(settings: Settings) -> list[Backend]:
    """Return the instances of the configuration, of all roles. The gateway sends its engine key to them.

    They are not watched: the process that reloads the configuration publishes them in one step, so that a reload with
    impossible instances is refused as a whole.
    """
    elastic = {endpoint.place for endpoint in settings.elastic.instances}
    return [
        Backend(
            role,
            endpoint.host,
            endpoint.port,
            is_trusted=True,
            bootstrap_port=endpoint.bootstrap_port,
            models=endpoint.models,
            tls=endpoint.tls,
            is_elastic=endpoint.place in elastic,
        )
        for role in Role
        for endpoint in settings.instances_of(role)
    ]
