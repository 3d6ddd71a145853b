"""The programs that are compared, each started in front of the same engines."""

from __future__ import annotations

import shutil
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from benchmark import environment
from benchmark.processes import HOST, free_ports
from benchmark.scenarios import ALL, LARGE_PROMPT, PACED, SHORT_ANSWER, SHORT_STREAM, SLOW_5000

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from benchmark.scenarios import Scenario

    Spelling: TypeAlias = Callable[[int, Sequence[int], Sequence[int]], list[str]]

DIRECT = "direct"
"""Not a program: the engines themselves."""
OURS = "pdproxy"
NOT_RESUMING = "not resuming"
RUST_ROUTERS = ("vllm-router", "sglang-router")
HAPROXY = "haproxy"
REFERENCE = "reference"
# What the script asks for, and what uvicorn finds beside it wherever vLLM is installed.
_REFERENCE_NEEDS = ("fastapi<0.124.0", "httpx", "uvicorn", "uvloop", "httptools")
_BOOTSTRAP_PORT = "8998"
_PYTHON = str(environment.PYTHON.absolute())


def _as_lists(port: int, prefill: Sequence[int], decode: Sequence[int]) -> list[str]:
    """The flags that the reference has and this gateway understands."""
    return [
        *("--host", HOST, "--port", str(port)),
        *("--prefiller-hosts", *[HOST] * len(prefill), "--prefiller-ports", *map(str, prefill)),
        *("--decoder-hosts", *[HOST] * len(decode), "--decoder-ports", *map(str, decode)),
    ]


def _as_urls(port: int, prefill: Sequence[int], decode: Sequence[int], *behind: str) -> list[str]:
    """The flags of the routers, with words `behind` each prefiller's URL."""
    (metrics_port,) = free_ports(1)
    return [
        *("--host", HOST, "--port", str(port), "--prometheus-port", str(metrics_port)),
        *(word for engine in prefill for word in ("--prefill", f"http://{HOST}:{engine}", *behind)),
        *(word for engine in decode for word in ("--decode", f"http://{HOST}:{engine}")),
    ]


def _as_urls_with_bootstrap_ports(port: int, prefill: Sequence[int], decode: Sequence[int]) -> list[str]:
    return _as_urls(port, prefill, decode, _BOOTSTRAP_PORT)


@dataclass(frozen=True, slots=True)
class Peer:
    """A program and the words that start it; flags for ports and engines follow them."""

    name: str
    words: tuple[str, ...]
    ready_path: str
    spelling: Spelling = _as_lists
    saturating: tuple[str, ...] = ()
    """More words, with which it uses two cores; none when it does so anyway or never."""
    only: frozenset[str] = ALL
    """Names of the scenarios that are worth their time here."""
    is_one_hop: bool = False
    """It passes a request on to a decoder and knows nothing of prefillers."""

    def command(
        self, port: int, prefill: Sequence[int], decode: Sequence[int], *, saturating: bool = False
    ) -> list[str]:
        """The command line."""
        return [*self.words, *(self.saturating if saturating else ()), *self.spelling(port, prefill, decode)]

    def takes(self, scenario: Scenario) -> bool:
        return scenario.name in self.only


def ours() -> Peer:
    """This gateway as it is started by default."""
    return Peer(OURS, (sys.executable, "-m", "proxy"), "/readyz", saturating=("--workers", "2"))


def not_resuming() -> Peer:
    """This gateway without exact resume, so without the token ids that it takes."""
    only = frozenset((SHORT_STREAM, SHORT_ANSWER, PACED, LARGE_PROMPT))
    return Peer(NOT_RESUMING, ("env", "PROXY_RESUME__MODE=restart-only", *ours().words), "/readyz", only=only)


def routers() -> list[Peer]:
    """The routers in Rust, as far as there are wheels for this platform."""
    found = []
    for peer, version in ((_vllm_router(), "0.1.17"), (_sglang_router(), "0.3.2")):
        if environment.provide((f"{peer.name}=={version}",)):
            found.append(peer)
        else:
            print(f"without {peer.name} {version}: no wheel of it could be installed", file=sys.stderr)
    return found


# Round robin is the cheapest policy that both have; they log only what goes wrong; everything else is as it comes.
def _vllm_router() -> Peer:
    """The pull protocol: the prefiller first, then the decoder with its parameters."""
    flags = ("--vllm-pd-disaggregation", "--policy", "round_robin", "--log-level", "error")
    return Peer("vllm-router", (_PYTHON, "-m", "vllm_router.launch_router", *flags), "/readiness", _as_urls)


def _sglang_router() -> Peer:
    """SGLang's protocol: the same request to both at once, with a room in which they meet."""
    flags = ("--pd-disaggregation", "--policy", "round_robin", "--log-level", "error")
    words = (_PYTHON, "-m", "sglang_router.launch_router", *flags)
    return Peer("sglang-router", words, "/readiness", _as_urls_with_bootstrap_ports)


def reference(script: Path) -> Peer:
    """vllm-ascend's example proxy, with what it needs in the peers' environment."""
    if not script.is_file():
        sys.exit(f"--reference: there is no file {script}")
    if not environment.provide(_REFERENCE_NEEDS):
        sys.exit("--reference: what the script needs could not be installed")
    # It cannot begin 5,000 streams within the time that they last.
    only = ALL - {SLOW_5000}
    return Peer(REFERENCE, (_PYTHON, str(script.resolve())), "/healthcheck", only=only)


# What stands in the way of a request that comes to a duel: a file of keys with limits that are not reached.
_CLIENT_KEYS = "keys: [{name: bench, key: bench, max_concurrent: 100000, requests_per_minute: 100000000}]\n"


def dueller(directory: Path, checkout: Path | None = None) -> Peer:
    """This gateway, or another checkout of it, with client keys and one worker. `directory` is for the file of keys."""
    keys = directory / "keys.yaml"
    keys.write_text(_CLIENT_KEYS)
    keys.chmod(0o600)
    there = () if checkout is None else ("-C", str(checkout.resolve()))
    name = OURS if checkout is None else checkout.resolve().name
    words = ("env", *there, f"PROXY_AUTH__CLIENT_KEYS_FILE={keys}", sys.executable, "-m", "proxy")
    return Peer(name, words, "/readyz")


def opponent(name: str, called_from: Path, directory: Path) -> Peer:
    """The peer of that name: a router in Rust, HAProxy, or another checkout of this gateway, whose path may be relative
    to `called_from`. Exits when there is none.
    """
    if name == HAPROXY:
        return _haproxy(directory)
    found = [peer for peer in routers() if peer.name == name] if name in RUST_ROUTERS else []
    if found:
        return found[0]
    checkout = called_from / name
    if (checkout / "proxy" / "__main__.py").is_file():
        return dueller(directory, checkout)
    sys.exit(f"--duel: {name} is neither {', '.join(RUST_ROUTERS)}, {HAPROXY} nor a checkout of this gateway")


def _haproxy(directory: Path) -> Peer:
    """The floor: a relay in C that only passes on what it gets, to decoders."""
    if shutil.which(HAPROXY) is None:
        sys.exit("--duel haproxy: there is no haproxy on the PATH (Debian: apt-get install haproxy)")

    def spelling(port: int, prefill: Sequence[int], decode: Sequence[int]) -> list[str]:
        servers = [f"  server d{index} {HOST}:{engine}" for index, engine in enumerate(decode)]
        configuration = [
            *("global", "  nbthread 1", "  maxconn 20000", "defaults", "  mode http", "  balance roundrobin"),
            *("  timeout client 1h", "  timeout server 1h", "  timeout connect 5s", "  http-reuse always"),
            *("frontend front", f"  bind {HOST}:{port}", "  default_backend engines", "backend engines", *servers),
        ]
        file = directory / f"haproxy-{port}.cfg"
        file.write_text("\n".join(configuration) + "\n")
        return ["-db", "-f", str(file)]

    return Peer(HAPROXY, (HAPROXY,), "/", spelling, is_one_hop=True)
