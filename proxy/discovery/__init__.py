"""Which instances there are: sources of discovery are watched, those that join are waited for, and all are probed.

A further source is one file here and one line in SOURCES.
"""

from typing import Final

from proxy.discovery.source import MakeSource

SOURCES: Final[dict[str, MakeSource]] = {}
"""By the name that their instances have as their origin, which neither `config` nor `admin` may be."""
