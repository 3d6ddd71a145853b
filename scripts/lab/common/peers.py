"""The programs that this gateway is compared with, each started in front of the same engines."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from lab.common.environment import PEERS
from lab.common.processes import HOST, free_ports

Spelling: TypeAlias = Callable[[int, Sequence[int], Sequence[int]], list[str]]

OURS = "pdproxy"
RUST_ROUTERS = ("vllm-router", "sglang-router")
REFERENCE = "reference"
# What the script asks for, and what uvicorn finds beside it wherever vLLM is installed.
_REFERENCE_NEEDS = ("fastapi<0.124.0", "httpx", "uvicorn", "uvloop", "httptools")
_BOOTSTRAP_PORT = "8998"
_PYTHON = str(PEERS.python)


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
    is_one_hop: bool = False
    """It passes a request on to a decoder and knows nothing of prefillers."""

    def command(
        self, port: int, prefill: Sequence[int], decode: Sequence[int], *, saturating: bool = False
    ) -> list[str]:
        """The command line."""
        return [*self.words, *(self.saturating if saturating else ()), *self.spelling(port, prefill, decode)]


def ours(directory: Path | None = None) -> Peer:
    """This gateway as it is started by default. `directory`: that has the package; None: the project's."""
    there = () if directory is None else ("env", "-C", str(directory.resolve()))
    return Peer(OURS, (*there, sys.executable, "-m", "proxy"), "/readyz", saturating=("--workers", "2"))


def routers(policy: str = "round_robin") -> list[Peer]:
    """The routers in Rust, as far as there are wheels for this platform. Round robin is the cheapest policy that both
    have.
    """
    found = []
    for peer, version in ((_vllm_router(policy), "0.1.17"), (_sglang_router(policy), "0.3.2")):
        if PEERS.provide((f"{peer.name}=={version}",)):
            found.append(peer)
        else:
            print(f"without {peer.name} {version}: no wheel of it could be installed", file=sys.stderr)
    return found


# They log only what goes wrong; everything else is as it comes.
def _vllm_router(policy: str) -> Peer:
    """The pull protocol: the prefiller first, then the decoder with its parameters."""
    flags = ("--vllm-pd-disaggregation", "--policy", policy, "--log-level", "error")
    return Peer("vllm-router", (_PYTHON, "-m", "vllm_router.launch_router", *flags), "/readiness", _as_urls)


def _sglang_router(policy: str) -> Peer:
    """SGLang's protocol: the same request to both at once, with a room in which they meet."""
    flags = ("--pd-disaggregation", "--policy", policy, "--log-level", "error")
    words = (_PYTHON, "-m", "sglang_router.launch_router", *flags)
    return Peer("sglang-router", words, "/readiness", _as_urls_with_bootstrap_ports)


def reference(script: Path) -> Peer:
    """vllm-ascend's example proxy, with what it needs in the peers' environment."""
    if not script.is_file():
        sys.exit(f"--reference: there is no file {script}")
    if not PEERS.provide(_REFERENCE_NEEDS):
        sys.exit("--reference: what the script needs could not be installed")
    return Peer(REFERENCE, (_PYTHON, str(script.resolve())), "/healthcheck")
