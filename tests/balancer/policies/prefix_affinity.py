"""Example of a policy that reads requests: adding one takes one file and one line.

It sends a prompt to the prefiller with most of its prefix, unless others are freer by more than that saves. It charges
the uncached tokens, and forgets prompts whose prefill failed.
"""

from __future__ import annotations

from collections.abc import Sequence

from proxy.balancer.pick import Candidate, LeaseTracker, PickRequest, Policy, PolicyContext
from proxy.common.backend import Backend, Load


class PrefixAffinity(Policy):
    """Policy for prefillers. Its memory is unbounded, so it is only an example."""

    def __init__(self, context: PolicyContext | None = None) -> None:
        super().__init__(context)
        self._has: dict[Backend, set[int]] = {}
        self.under_way = 0
        """Number of requests in flight."""

    def choose_candidate(
        self, candidates: Sequence[Candidate], weights: Sequence[int], request: PickRequest
    ) -> Candidate:
        """Choose by the tokens to compute before the prompt is done; among equals, by the fewest cached tokens."""

        def cost(candidate: Candidate) -> tuple[int, int]:
            backend = candidate.backend
            return candidate.charged_load.compute_tokens + self.load_of_request(backend, request).compute_tokens, len(
                self.keys_of(backend)
            )

        return min(candidates, key=cost)

    def load_of_request(self, backend: Backend, request: PickRequest) -> Load:
        """Charge the uncached part of the prompt."""
        load = request.load_for_role(backend.role)
        prefix = request.prefix_keys
        has = self.keys_of(backend)
        size = next((size for key, size in reversed([*zip(prefix.keys, prefix.sizes, strict=True)]) if key in has), 0)
        cached = request.prompt_tokens * size // prefix.sizes[-1] if size else 0
        return Load(compute_tokens=load.compute_tokens - cached, kv_tokens=load.kv_tokens)

    def start_tracker(self, backend: Backend, request: PickRequest) -> LeaseTracker:
        """Count prompts in flight as cached, or a burst with one prompt would scatter."""
        load = self.load_of_request(backend, request)
        has = self._has.setdefault(backend, set())
        added = set(request.prefix_keys.keys) - has
        has |= added
        self.under_way += 1
        return _Sent(load, self, has, added)

    def keys_of(self, backend: Backend) -> set[int]:
        """Return the keys that a prefiller is expected to have cached."""
        return self._has.get(backend, set())


class _Sent(LeaseTracker):
    """Prompt in flight."""

    def __init__(self, load: Load, policy: PrefixAffinity, has: set[int], added: set[int]) -> None:
        super().__init__(load)
        self._policy = policy
        self._has = has
        self._added = added

    def record_end(self, is_served: bool, answer_tokens: int | None) -> None:
        """Drop the keys of a prompt that was not prefilled."""
        self._policy.under_way -= 1
        if not is_served:
            self._has -= self._added
