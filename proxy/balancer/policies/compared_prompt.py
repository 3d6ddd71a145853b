"""A prompt for which prefillers are compared: what is to be known of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from proxy.balancer.pick import PickRequest

# Shorter prompts are not looked up: to compute them anew takes hardly longer.
LEAST_TOKENS: Final = 256


@dataclass(slots=True, eq=False)
class ComparedPrompt:
    """A request that is chosen for, or waits to be, and what it takes each backend."""

    request: PickRequest
    keys: Sequence[int]
    ends: Sequence[float]
    """Tokens up to the end of each piece."""
    tokens: int
    """Of the prompt."""
    there: dict[Hashable, tuple[int, int, float]] = field(default_factory=dict)
    """By Prefiller: the version of what is known of it, the pieces that are cached there, and seconds."""


def compared_prompt(request: PickRequest) -> ComparedPrompt:
    """What is to be known of a request."""
    subject = request.subject
    tokens = 0 if subject is None else subject.prompt_tokens
    if subject is None or tokens < LEAST_TOKENS or not (prefix := subject.prefix_keys).keys:
        return ComparedPrompt(request, (), (), tokens)
    per_byte = tokens / prefix.sizes[-1]
    return ComparedPrompt(request, prefix.keys, list(map(per_byte.__mul__, prefix.sizes)), tokens)
