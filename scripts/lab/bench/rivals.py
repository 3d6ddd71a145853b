"""Whom a run of the benchmark measures besides `lab.common.peers`, and in which scenarios."""

from __future__ import annotations

import resource
import shutil
import sys
from typing import TYPE_CHECKING, Final

from lab.bench.scenarios import LARGE_PROMPT, PACED, SHORT_ANSWER, SHORT_STREAM, SLOW_5000
from lab.common.peers import OURS, REFERENCE, RUST_ROUTERS, Peer, ours, routers
from lab.common.processes import HOST

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from lab.bench.scenarios import Scenario

DIRECT: Final = "direct"
"""Not a program: the engines themselves."""
NOT_RESUMING: Final = "not resuming"
HAPROXY: Final = "haproxy"


def takes_part(peer: Peer, scenario: Scenario) -> bool:
    """Whether a program is worth its time in a scenario."""
    if peer.name == NOT_RESUMING:
        return scenario.name in (SHORT_STREAM, SHORT_ANSWER, PACED, LARGE_PROMPT)
    # The reference cannot begin 5,000 streams within the time that they last.
    return not (peer.name == REFERENCE and scenario.name == SLOW_5000)


def not_resuming(directory: Path | None) -> Peer:
    """This gateway without exact resume, so without the token ids that it takes. `directory`: see `ours`."""
    return Peer(NOT_RESUMING, ("env", "PROXY_RESUME__MODE=restart-only", *ours(directory).words), "/readyz")


# What stands in the way of a request that comes to a duel: a file of keys with limits that are not reached.
_CLIENT_KEYS = "keys: [{name: bench, key: bench, max_concurrent: 100000, requests_per_minute: 100000000}]\n"


def dueller(directory: Path, connector: str, checkout: Path | None = None, name: str = OURS) -> Peer:
    """This gateway, or another checkout of it, with client keys and one worker. `directory` is for the file of keys."""
    keys = directory / "keys.yaml"
    keys.write_text(_CLIENT_KEYS)
    keys.chmod(0o600)
    settings = (f"PROXY_AUTH__CLIENT_KEYS_FILE={keys}", f"PROXY_CONNECTOR={connector}")
    return Peer(name, ("env", *settings, *ours(checkout).words), "/readyz")


def opponent(name: str, called_from: Path, directory: Path, connector: str) -> Peer:
    """The peer of that name: a router in Rust, HAProxy, or another checkout of this gateway, whose path may be relative
    to `called_from`, with this connector. Exits when there is none.
    """
    if name == HAPROXY:
        return _haproxy(directory)
    found = [peer for peer in routers() if peer.name == name] if name in RUST_ROUTERS else []
    if found:
        return found[0]
    checkout = called_from / name
    if (checkout / "proxy" / "__main__.py").is_file():
        return dueller(directory, connector, checkout, checkout.resolve().name)
    sys.exit(f"--duel: {name} is neither {', '.join(RUST_ROUTERS)}, {HAPROXY} nor a checkout of this gateway")


def _haproxy(directory: Path) -> Peer:
    """The floor: a relay in C that only passes on what it gets, to decoders."""
    if shutil.which(HAPROXY) is None:
        sys.exit("--duel haproxy: there is no haproxy on the PATH (Debian: apt-get install haproxy)")

    # It takes two descriptors for each, and does not start where they may not be opened.
    most = min(20_000, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2 - 100)

    def spelling(port: int, prefill: Sequence[int], decode: Sequence[int]) -> list[str]:
        servers = [f"  server d{index} {HOST}:{engine}" for index, engine in enumerate(decode)]
        configuration = [
            *("global", "  nbthread 1", f"  maxconn {most}", "defaults", "  mode http", "  balance roundrobin"),
            *("  timeout client 1h", "  timeout server 1h", "  timeout connect 5s", "  http-reuse always"),
            "  option http-no-delay",  # otherwise it keeps tokens for up to 200 ms, to send several at once
            *("frontend front", f"  bind {HOST}:{port}", "  default_backend engines", "backend engines", *servers),
        ]
        file = directory / f"haproxy-{port}.cfg"
        file.write_text("\n".join(configuration) + "\n")
        return ["-db", "-f", str(file)]

    return Peer(HAPROXY, (HAPROXY,), "/", spelling, is_one_hop=True)
