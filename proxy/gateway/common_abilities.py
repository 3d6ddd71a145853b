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
        """`kind`: the engine software of the connector, see `Identity.kind`. None: the engines report it."""
        self._pools = tuple(pools)
        self._connectors_kind = kind
        self._seen = [(pool, -1) for pool in self._pools]
        """The pools, with the number of their changes at the last check."""
        self._facts: list[EngineFacts | None] = []
        """The facts of all eligible engines. None: not known yet."""
        self._results: dict[Capability, bool] = {}
        self._engine: Engine | None = None
        self._kind = ""

    @property
    def engine(self) -> Engine | None:
        """The kind of all engines. None: they are of several kinds."""
        self._look()
        return self._engine

    def has(self, capability: Capability) -> bool:
        """Return whether all engines have a capability. False if there are no engines."""
        self._look()
        result = self._results.get(capability)
        if result is None:
            result = self._results[capability] = self._have(capability, self._facts)
        return result

    def has_if_known(self, capability: Capability) -> bool:
        """Return whether all engines of known version have a capability.

        So an engine that has just started does not affect the answers of other engines.
        """
        self._look()
        return self._have(capability, [facts for facts in self._facts if facts is not None] or self._facts)

    def _have(self, capability: Capability, facts: Sequence[EngineFacts | None]) -> bool:
        return bool(facts) and all(capability.is_in_engine(each, self._kind) for each in facts)

    def max_model_len(self) -> int | None:
        """Return the largest number of tokens in a sequence on all engines. None: no engine has reported it."""
        self._look()
        lengths = [facts.max_model_len for facts in self._facts if facts is not None]
        return min((length for length in lengths if length is not None), default=None)

    def _look(self) -> None:
        """Read the facts of the engines again if a pool has changed, or if there was no engine."""
        for pool, changes in self._seen:
            if pool.changes != changes:
                break
        else:
            if self._facts:
                return
        self._results.clear()
        self._facts = [pool.health.of(backend).facts for pool in self._pools for backend in pool.eligible()]
        self._seen = [(pool, pool.changes) for pool in self._pools]
        kinds = {facts.identity.kind for facts in self._facts if facts is not None} - {None}
        if self._connectors_kind is not None:
            kinds = {self._connectors_kind}
        self._engine = None if len(kinds) > 1 else VLLM
        for kind in kinds if len(kinds) == 1 else ():
            self._kind = kind or ""
            self._engine = ENGINES[self._kind]
