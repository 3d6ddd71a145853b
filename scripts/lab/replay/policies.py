"""All that takes part in a replay, by name: the own policies, other gateways' rules, and one that knows all."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Final

from lab.replay.clairvoyant import Clairvoyant, ClairvoyantDecode
from lab.replay.engines import Engine
from lab.replay.fleet import Fleet, MakePolicy
from lab.replay.peers import peers
from proxy.backend import Backend
from proxy.balancer.pick import Policy, PolicyContext
from proxy.balancer.policies.least_tokens import make_policy
from proxy.settings import POLICIES
from proxy.sim.hardware.machines import MACHINES

OURS: Final = "least_load"
TODAY: Final = "today"
"""Tokens are counted, for both roles: what the gateway did by default before it counted seconds."""
CLAIRVOYANT: Final = "clairvoyant"


def policies(fleet: Fleet, decode_policy: str) -> dict[str, tuple[MakePolicy, MakePolicy]]:
    """For prefillers and for decoders. `decode_policy`: beside each of the gateway's own."""
    own = {name: (_of_table(name), _of_table(decode_policy)) for name in POLICIES}
    others = {name: (_blind(prefill), _blind(decode)) for name, (prefill, decode) in _peers(fleet).items()}

    def knowing(context: PolicyContext, engines: Mapping[Backend, Engine]) -> Policy:
        return Clairvoyant(engines, fleet.prefill_machine.cost, context)

    decoding = _blind(partial(ClairvoyantDecode, fleet.decode_machine))
    today = {TODAY: (_of_table("least_tokens"), _of_table("least_tokens"))}
    return own | today | others | {CLAIRVOYANT: (knowing, decoding)}


def peer_names() -> list[str]:
    """Of other gateways' rules."""
    return list(peers(next(iter(MACHINES.values())).cost))


def policy_names() -> list[str]:
    """Of all."""
    return [*POLICIES, TODAY, *peer_names(), CLAIRVOYANT]


def _peers(fleet: Fleet) -> dict[str, tuple[Callable[[PolicyContext], Policy], Callable[[PolicyContext], Policy]]]:
    return peers(fleet.prefill_machine.cost)


def _of_table(name: str) -> MakePolicy:
    return _blind(partial(make_policy, name))


def _blind(make: Callable[[PolicyContext], Policy]) -> MakePolicy:
    """One that does not look into engines."""
    return lambda context, _engines: make(context)
