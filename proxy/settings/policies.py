"""Names of policies in options, and their classes in the balancer.

The classes are given as text and not imported, because settings are a lower layer than the balancer.
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
"""Policies for decoders, which work in another way than those for prefillers."""


def policy_names(quote: str = "") -> str:
    """Return all names as text for users."""
    *others, last = (f"{quote}{name}{quote}" for name in POLICIES)
    return f"{', '.join(others)} or {last}"


def known_policy(name: str) -> str:
    """Return the same name. Raises ValueError for an unknown policy."""
    if name not in POLICIES:
        raise ValueError("must be " + policy_names(quote="'"))
    return name
