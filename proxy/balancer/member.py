"""A backend of the roster, and who wants it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from proxy.balancer.slow_start import FULL
from proxy.common.backend import Backend, Role

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True)
class Member:
    """A backend and who wants it."""

    backend: Backend
    origins: tuple[str, ...] = ()
    """The origins that want it, in alphabetical order. Empty: it drains."""
    leaves_at: float | None = None
    """When it is to be evacuated, if it drains or is disabled, in seconds of the system's monotonic clock, which all
    workers share; None: its requests may come to their end."""
    is_disabled: bool = False
    """An administrator has it get no new requests, although it is wanted."""
    weight: int = FULL
    """How much of its share of requests it is to get, in per cent, from 1 to 100."""

    @property
    def draining(self) -> bool:
        """Whether it is to get no new requests, because no origin wants it any more."""
        return not self.origins

    @property
    def serves(self) -> bool:
        """Whether it may get new requests, as far as origins and administrators are concerned."""
        return bool(self.origins) and not self.is_disabled

    def wanted_by(self, origin: str) -> Member:
        """The same with one more origin."""
        origins = tuple(sorted({*self.origins, origin}))
        return replace(self, origins=origins, leaves_at=self.leaves_at if self.is_disabled else None)

    def given_up_by(self, origin: str, leaves_at: float | None) -> Member:
        """The same without this origin; it drains if there is no other, and is then evacuated at `leaves_at`."""
        left = tuple(other for other in self.origins if other != origin)
        return replace(self, origins=left) if left else Member(self.backend, leaves_at=leaves_at)

    def told(self, wanted: Backend, *, is_authority: bool) -> Member:
        """The same with what an origin says of its backend. Where that gives no bootstrap port or no models, the known
        ones stay unless the origin is the authority.
        """
        known = self.backend
        has_said = is_authority or wanted.bootstrap_port is not None
        backend = replace(
            known,
            trusted=known.trusted or wanted.trusted,
            bootstrap_port=wanted.bootstrap_port if has_said else known.bootstrap_port,
            models=wanted.models if is_authority or wanted.models else known.models,
        )
        return replace(self, backend=backend)

    @property
    def row(self) -> tuple[object, ...]:
        """As it lies in shared memory."""
        b = self.backend
        place = (b.role, b.host, b.port, b.bootstrap_port, b.slot, b.trusted)
        return *place, self.origins, self.leaves_at, self.is_disabled, self.weight, b.models

    @classmethod
    def of_row(cls, row: Sequence[Any]) -> Member:
        """Return what lies in shared memory, perhaps since a gateway of a version without models."""
        role, host, port, bootstrap_port, slot, trusted, origins, leaves_at, is_disabled, weight, *models = row
        backend = Backend(Role(role), host, port, slot, trusted, bootstrap_port, tuple(models[0]) if models else ())
        return cls(backend, tuple(origins), leaves_at, is_disabled, weight)
