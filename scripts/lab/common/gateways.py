"""Several gateways that share."""

from __future__ import annotations

import re
import sys
import time
from typing import TYPE_CHECKING
from urllib.request import urlopen

from lab.common.processes import HOST

if TYPE_CHECKING:
    from collections.abc import Sequence

_FOLLOWED_SECONDS = 10.0


def become_aware(ports: Sequence[int], of: int) -> None:
    """Until each gateway knows so many others. Exits if that takes too long."""
    deadline = time.monotonic() + _FOLLOWED_SECONDS
    while any(figure(port, "replicas_peers") != of for port in ports):
        if time.monotonic() > deadline:
            sys.exit(f"in vain: each gateway knows {of} others")
        time.sleep(0.05)


def figure(port: int, name: str) -> float:
    """The sum over a metric's series of a gateway; -1: there are none."""
    with urlopen(f"http://{HOST}:{port}/metrics", timeout=5) as answer:
        found = re.findall(rf"^pdproxy_{name}(?:\{{.*\}})? (\S+)$", answer.read().decode(), re.MULTILINE)
    return sum(map(float, found)) if found else -1.0
