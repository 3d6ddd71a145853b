"""The pools of all roles, and the choice of a prefiller that goes with a decoder."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from proxy.balancer.health.pair_quarantine import PairQuarantine
from proxy.balancer.lease import Lease

if TYPE_CHECKING:
    from proxy.balancer.pick import PickRequest
    from proxy.balancer.pool import Pool
    from proxy.common.backend import Backend, Role


@dataclass(slots=True, eq=False)
class Pools:
    """The backends of all roles."""

    prefill: Pool
    decode: Pool
    quarantine: PairQuarantine = field(default_factory=PairQuarantine)
    """Which prefillers and decoders had better not be brought together."""
    encode: Pool | None = None
    """None: there are no encoders."""

    def of(self, role: Role) -> Pool:
        """The pool of one role."""
        if self.encode is not None and role == self.encode.role:
            return self.encode
        return self.prefill if role == self.prefill.role else self.decode

    def prefiller_for(self, decoder: Backend, request: PickRequest) -> Lease:
        """A prefiller's lease, to be entered at once, for a request whose decoder is leased already.

        Prefillers that are kept apart from this decoder are avoided, too, unless no other would be left.
        """
        if self.quarantine.apart and (apart := self.quarantine.partners_to_avoid(decoder)):
            both = apart.union(request.avoid)
            if not both.issuperset(self.prefill.eligible()):
                request = request.avoiding(both)
        return Lease(self.prefill, request)
