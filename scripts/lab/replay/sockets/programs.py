"""Which programs are compared over sockets, and how each is told its policy."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from lab.common import peers

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

    from lab.common.peers import Peer

_ROUTERS_POLICIES: Final = ("cache_aware", "round_robin")


@dataclass(frozen=True, slots=True)
class Program:
    """A program with its policy."""

    name: str
    peer: Peer
    policy: str | None = None
    """The gateway's own for prefillers; None: it is not this gateway."""
    copies: int = 1
    """Processes of it, any of which gets a request."""
    shares: str = "nothing"
    """What they tell each other, as scripts/replay --share."""


def programs(options: argparse.Namespace) -> Iterator[Program]:
    """This gateway by each of the policies of the command line, and whoever can be had of the others."""
    ours = peers.ours()
    for policy in options.policies:
        settings = {
            "BALANCE__PREFILL_POLICY": policy,
            "BALANCE__DECODE_POLICY": options.decode_policy,
            "ADMISSION__MAX_RUNNING_PREFILL": options.max_running_prefill,
            "ADMISSION__MAX_RUNNING_DECODE": options.max_running_decode,
        }
        given = [f"PROXY_{name}={value}" for name, value in settings.items() if value is not None]
        copies, shares = options.gateways, options.share
        name = f"{peers.OURS}, {policy}" + (f", {copies} sharing {shares}" if copies > 1 else "")
        yield Program(name, replace(ours, words=("env", *given, *ours.words)), policy, copies, shares)
    if options.gateways > 1:
        return  # they are compared with one of the same
    for policy in _ROUTERS_POLICIES:
        for peer in peers.routers(policy):
            yield Program(f"{peer.name}, {policy}", peer)
    if options.reference is not None:
        yield Program("vllm-ascend's example", peers.reference(options.reference))
