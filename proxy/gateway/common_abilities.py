"""The abilities that all engines of a request have in common."""

from __future__ import annotations

from typing import TYPE_CHECKING

from proxy.resume.engines import ENGINES, VLLM

if TYPE_CHECKING:
    from collections.abc import Sequence

    from proxy.balancer.engines import Capability, EngineFacts
    from proxy.balancer.pool import Pool
    from proxy.resume.engines import Engine


class CommonAbilities:
    """The abilities that all eligible engines have in common. They are read again after a change of a pool."""

    def __init__(self, pools: Sequence[Pool], kind: str | None) -> None:
        """`kind`: the connector's engine software, see `EngineIdentity.engine_kind`. None: the engines report it."""
        self._pools = tuple(pools)
        self._required_engine_kind = kind
        self._seen_pool_versions = [(pool, -1) for pool in self._pools]
        """The pools, with the number of their changes at the last check."""
        self._engine_facts: list[EngineFacts | None] = []
        """The facts of all eligible engines. None: not known yet."""
        self._results_by_capability: dict[Capability, bool] = {}
        self._common_engine: Engine | None = None
        self._engine_kind = ""

    @property
    def common_engine(self) -> Engine | None:
        """The kind of all engines. None: they are of several kinds."""
        self._update_facts()
        return self._common_engine

    def have_all(self, capability: Capability) -> bool:
        """Return whether all engines have a capability. False if there are no engines."""
        self._update_facts()
        result = self._results_by_capability.get(capability)
        if result is None:
            result = self._results_by_capability[capability] = self._have_capability(capability, self._engine_facts)
        return result

    def have_all_known(self, capability: Capability) -> bool:
        """Return whether all engines of known version have a capability.

        So an engine that has just started does not affect the answers of other engines.
        """
        self._update_facts()
        return self._have_capability(
            capability, [facts for facts in self._engine_facts if facts is not None] or self._engine_facts
        )

    def _have_capability(self, capability: Capability, facts: Sequence[EngineFacts | None]) -> bool:
        return bool(facts) and all(capability.is_available_in(each, self._engine_kind) for each in facts)

    def max_model_len(self) -> int | None:
        """Return the largest number of tokens in a sequence on all engines. None: no engine has reported it."""
        self._update_facts()
        lengths = [facts.max_model_len for facts in self._engine_facts if facts is not None]
        return min((length for length in lengths if length is not None), default=None)

    def _update_facts(self) -> None:
        """Read the facts of the engines again if a pool has changed, or if there was no engine."""
        for pool, changes in self._seen_pool_versions:
            if pool.change_count != changes:
                break
        else:
            if self._engine_facts:
                return
        self._results_by_capability.clear()
        self._engine_facts = [
            pool.health.health_of(backend).engine_facts for pool in self._pools for backend in pool.eligible_backends()
        ]
        self._seen_pool_versions = [(pool, pool.change_count) for pool in self._pools]
        kinds = {facts.identity.engine_kind for facts in self._engine_facts if facts is not None} - {None}
        if self._required_engine_kind is not None:
            kinds = {self._required_engine_kind}
        self._common_engine = None if len(kinds) > 1 else VLLM
        for kind in kinds if len(kinds) == 1 else ():
            self._engine_kind = kind or ""
            self._common_engine = ENGINES[self._engine_kind]
