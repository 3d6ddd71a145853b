"""The compared programs and connectors, and how both are started."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

from lab.common import peers
from lab.common.peers import PEERS, Peer
from lab.common.processes import HOST, free_ports
from lab.differential import protocols
from lab.differential.protocols import EngineProtocol, Engines
from lab.differential.requests import NATIVE, OPENAI, Request

Flags: TypeAlias = Callable[[int, Engines], list[str]]

# Modules that the layerwise script imports from packages of gigabytes, for a logger and a name.
_IN_PLACE_OF_PACKAGES = {
    "vllm/logger.py": "from logging import getLogger as init_logger\n",
    "vllm_ascend/distributed/kv_transfer/kv_p2p/sfa_pd_rd2h/protocol.py": (
        'BATCH_KV_TRANSFER_PARAMS = "batch_kv_transfer_params"\n'
    ),
}


@dataclass(frozen=True, slots=True)
class Side:
    """A program, the words that start it, and its readiness path."""

    name: str
    words: tuple[str, ...]
    ready_path: str
    flags: Flags
    """Additional words for its port and the engines."""
    packages: Path | None = None
    """A directory of modules that it imports, or None."""


@dataclass(frozen=True, slots=True)
class Pair:
    """A program and the equivalent connector of pdproxy."""

    peer: Side
    connector: str
    protocol: Callable[[], EngineProtocol]
    requests: Sequence[Request] = OPENAI

    @property
    def name(self) -> str:
        """Name in the table."""
        return f"{self.peer.name} / {self.connector}"

    @property
    def ours(self) -> Side:
        """This gateway with the connector and default settings."""
        ours = peers.ours()
        return Side(
            "pdproxy", (*ours.words, "--connector", self.connector), ours.ready_path, _OUR_FLAGS[self.connector]
        )


def routers() -> list[Pair]:
    """Return the pairs of the routers in Rust and of SGLang's mini_lb, as far as there are wheels."""
    found = {peer.name: peer for peer in peers.routers()}
    pairs = []
    if (vllm := found.get("vllm-router")) is not None:
        pairs.append(Pair(_router(vllm, _as_urls), "vllm_pull", protocols.Pull))
        mooncake = _router(vllm, _with_bootstrap_port, "--kv-connector", "mooncake")
        pairs.append(Pair(mooncake, "mooncake_bootstrap", protocols.Push))
    if (sglang := found.get("sglang-router")) is not None:
        both = (*OPENAI, *NATIVE)
        router = _router(sglang, _with_bootstrap_port)
        pairs.append(Pair(router, "sglang_bootstrap", protocols.Bootstrap, both))
        if PEERS.provide(("aiohttp", "fastapi<0.124.0", "orjson", "uvicorn")):
            mini_lb = replace(router, name="mini_lb", words=(*router.words, "--mini-lb"), ready_path="/health")
            pairs.append(Pair(mini_lb, "sglang_bootstrap", protocols.Bootstrap, both))
    return pairs


def reference(script: Path) -> Pair:
    """Return the pair of vLLM-Ascend's example for the pull protocol."""
    peer = peers.reference(script)
    return Pair(Side(peer.name, peer.words, peer.ready_path, _as_lists), "vllm_pull", protocols.Pull)


def layerwise(script: Path, packages: Path) -> Pair:
    """Return the pair of vLLM-Ascend's example for the layerwise protocol.

    `packages`: an empty directory for modules that it imports.
    """
    peer = peers.reference(script)
    for name, text in _IN_PLACE_OF_PACKAGES.items():
        (packages / name).parent.mkdir(parents=True, exist_ok=True)
        (packages / name).write_text(text)
    program = Side("layerwise", peer.words, peer.ready_path, _as_lists, packages)
    return Pair(program, "ascend_layerwise", protocols.Layerwise)


def _router(peer: Peer, flags: Flags, *more: str) -> Side:
    return Side(peer.name, (*peer.words, *more), peer.ready_path, _with_metrics(flags))


def _as_lists(port: int, engines: Engines) -> list[str]:
    """Return the flags of the reference."""
    return [
        *("--host", HOST, "--port", str(port)),
        *("--prefiller-hosts", HOST, "--prefiller-ports", str(engines.prefill_port)),
        *("--decoder-hosts", HOST, "--decoder-ports", str(engines.decode_port)),
    ]


def _as_urls(port: int, engines: Engines, *behind: str) -> list[str]:
    """Return the flags of the routers, with the words `behind` after the prefiller's URL."""
    return [
        *("--host", HOST, "--port", str(port)),
        *("--prefill", f"http://{HOST}:{engines.prefill_port}", *behind),
        *("--decode", f"http://{HOST}:{engines.decode_port}"),
    ]


def _with_bootstrap_port(port: int, engines: Engines) -> list[str]:
    return _as_urls(port, engines, str(engines.bootstrap_port))


def _with_metrics(flags: Flags) -> Flags:
    """Add a free port for metrics, which is fixed otherwise."""
    return lambda port, engines: ["--prometheus-port", str(*free_ports(1)), *flags(port, engines)]


_OUR_FLAGS: Mapping[str, Flags] = {
    "vllm_pull": _as_lists,
    "ascend_layerwise": _as_lists,
    "sglang_bootstrap": _with_bootstrap_port,
    "mooncake_bootstrap": _with_bootstrap_port,
}
