"""The table of policies: what an option calls each of them, and the class that it is, in the balancer.

The classes are named and not imported, because settings stand below the balancer.
"""

from __future__ import annotations

from typing import Final

POLICIES: Final = {
    "least_load": "proxy.balancer.policies.least_seconds:LeastSeconds",
    "least_tokens": "proxy.balancer.policies.least_tokens:LeastTokens",
    "round_robin": "proxy.balancer.policies.least_tokens:RoundRobin",
    "power_of_two": "proxy.balancer.policies.least_tokens:PowerOfTwo",
    "random": "proxy.balancer.policies.least_tokens:Random",
    "length_groups": "proxy.balancer.policies.least_tokens:LengthGroups",
}
DECODE_POLICIES: Final = POLICIES | {"least_load": "proxy.balancer.policies.least_decode_seconds:LeastDecodeSeconds"}
"""The same for decoders: what they do is not what prefillers do."""


def policy_names(quote: str = "") -> str:
    """All of them in words, for people."""
    *others, last = (f"{quote}{name}{quote}" for name in POLICIES)
    return f"{', '.join(others)} or {last}"


def known_policy(name: str) -> str:
    """The same name. Raises ValueError for one that no policy has."""
    if name not in POLICIES:
        raise ValueError("must be " + policy_names(quote="'"))
    return name
