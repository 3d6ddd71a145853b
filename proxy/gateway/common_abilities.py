"""What all engines that an attempt may reach are able to do, read again after a change of a pool."""

from __future__ import annotations

from typing import TYPE_CHECKING

from proxy.resume.engines import ENGINES, VLLM

if TYPE_CHECKING:
    from collections.abc import Sequence

    from proxy.balancer.engines import Capability, EngineFacts
    from proxy.balancer.pool import Pool
    from proxy.resume.engines import Engine


class CommonAbilities:
    """What all eligible engines of the roles that a request needs have in common."""

    def __init__(self, pools: Sequence[Pool], kind: str | None) -> None:
        """`kind`: the software that the connector is for, as `Identity.kind` has it; None: any, and they say which."""
        self._pools = tuple(pools)
        self._connectors_kind = kind
        self._seen = [(pool, -1) for pool in self._pools]
        """How many changes each of them had had at the last look."""
        self._facts: list[EngineFacts | None] = []
        self._known: dict[Capability, bool] = {}
        self._engine: Engine | None = None
        self._kind = ""

    @property
    def engine(self) -> Engine | None:
        """How they tell answers and take them up again; None: they are of several kinds."""
        self._look()
        return self._engine

    def has(self, capability: Capability) -> bool:
        """Whether all of them have it; False when there are none."""
        self._look()
        known = self._known.get(capability)
        if known is None:
            known = self._known[capability] = self._have(capability, self._facts)
        return known

    def has_where_told(self, capability: Capability) -> bool:
        """Whether all of them have it that have told what they are. So one that has just come up says nothing of
        answers that others have written.
        """
        self._look()
        return self._have(capability, [facts for facts in self._facts if facts is not None] or self._facts)

    def _have(self, capability: Capability, facts: Sequence[EngineFacts | None]) -> bool:
        return bool(facts) and all(capability.is_in_engine(each, self._kind) for each in facts)

    def max_model_len(self) -> int | None:
        """Tokens that fit into a sequence on every engine; None when none has told."""
        self._look()
        known = [facts.max_model_len for facts in self._facts if facts is not None]
        return min((length for length in known if length is not None), default=None)

    def _look(self) -> None:
        """Nearly free as long as nothing has changed. As long as there is nobody, the pools look, too; otherwise each
        lease has them do so.
        """
        for pool, changes in self._seen:
            if pool.changes != changes:
                break
        else:
            if self._facts:
                return
        self._known.clear()
        self._facts = [pool.health.of(backend).facts for pool in self._pools for backend in pool.eligible()]
        self._seen = [(pool, pool.changes) for pool in self._pools]
        kinds = {facts.identity.kind for facts in self._facts if facts is not None} - {None}
        if self._connectors_kind is not None:
            kinds = {self._connectors_kind}
        self._engine = None if len(kinds) > 1 else VLLM
        for kind in kinds if len(kinds) == 1 else ():
            self._kind = kind or ""
            self._engine = ENGINES[self._kind]
