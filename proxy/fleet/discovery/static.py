"""The configured instances, as an origin among others.

They are not watched: the process that reads the configuration again publishes them with it, in one step, so that a
reload whose instances cannot be is refused as a whole.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from proxy.common.backend import Backend, Role

if TYPE_CHECKING:
    from proxy.settings import Settings


def configured(settings: Settings) -> list[Backend]:
    """Those of all roles. All are trusted with the engine key."""
    by_role = ((Role.PREFILL, settings.prefill), (Role.DECODE, settings.decode), (Role.ENCODE, settings.encode))
    return [
        Backend(
            role,
            endpoint.host,
            endpoint.port,
            trusted=True,
            bootstrap_port=endpoint.bootstrap_port,
            models=endpoint.models,
        )
        for role, endpoints in by_role
        for endpoint in endpoints
    ]
