"""A policy that looks at requests, as somebody could add one: the proof that it takes one file and one line.

It sends a prompt where most of it has been before, unless others are freer by more than that saves. It charges a
prefiller for what the prefiller has to compute, and forgets what no prefill has come of.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from proxy.balancer.pick import Policy, Tracker
from proxy.common.backend import Load

if TYPE_CHECKING:
    from collections.abc import Sequence

    from proxy.balancer.pick import Candidate, PickRequest, PolicyContext
    from proxy.common.backend import Backend


class PrefixAffinity(Policy):
    """For prefillers. It remembers without end, which a policy to be used must not."""

    def __init__(self, context: PolicyContext | None = None) -> None:
        super().__init__(context)
        self._has: dict[Backend, set[int]] = {}
        self.under_way = 0
        """Requests that began and have not ended."""

    def choose(self, candidates: Sequence[Candidate], weights: Sequence[int], request: PickRequest) -> Candidate:
        """By what has to be computed until the prompt has been; among equals the one that has the least to forget."""

        def cost(candidate: Candidate) -> tuple[int, int]:
            backend = candidate.backend
            return candidate.load.compute + self.cost_of(backend, request).compute, len(self.keys_of(backend))

        return min(candidates, key=cost)

    def cost_of(self, backend: Backend, request: PickRequest) -> Load:
        """Only the rest of the prompt is computed."""
        load = request.load(backend.role)
        prefix = request.prefix_keys
        has = self.keys_of(backend)
        size = next((size for key, size in reversed([*zip(prefix.keys, prefix.sizes, strict=True)]) if key in has), 0)
        cached = request.prompt_tokens * size // prefix.sizes[-1] if size else 0
        return Load(compute=load.compute - cached, kv=load.kv)

    def track(self, backend: Backend, request: PickRequest) -> Tracker:
        """What is under way counts as well, or a burst with one prompt would scatter."""
        load = self.cost_of(backend, request)
        has = self._has.setdefault(backend, set())
        added = set(request.prefix_keys.keys) - has
        has |= added
        self.under_way += 1
        return _Sent(load, self, has, added)

    def keys_of(self, backend: Backend) -> set[int]:
        """What it thinks a prefiller has."""
        return self._has.get(backend, set())


class _Sent(Tracker):
    """A prompt under way."""

    def __init__(self, load: Load, policy: PrefixAffinity, has: set[int], added: set[int]) -> None:
        super().__init__(load)
        self._policy = policy
        self._has = has
        self._added = added

    def note_end(self, served: bool, answer_tokens: int | None) -> None:
        """What was not prefilled is not there."""
        self._policy.under_way -= 1
        if not served:
            self._has -= self._added
