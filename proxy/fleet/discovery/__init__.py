"""Which instances there are: sources of discovery are watched, those that join are waited for, and all are probed.

A further kind of source is one file here and one line in SOURCES.
"""

import pkgutil
from typing import Final

from proxy.fleet.discovery.dns_names import looked_up_names
from proxy.fleet.discovery.files import WatchedFiles
from proxy.fleet.discovery.source import MakeSources

SOURCES: Final[dict[str, MakeSources]] = {
    "file": lambda settings: map(WatchedFiles, settings.discovery.files),
    "dns": looked_up_names,
    # Named and not imported: aiohttp would keep the program's first line waiting.
    "kubernetes": lambda settings: pkgutil.resolve_name("proxy.fleet.discovery.kubernetes:watched_slices")(settings),
}
"""By kind. `kind:name` is a source's origin: what its instances show as such."""
