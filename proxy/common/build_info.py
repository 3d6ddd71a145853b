"""Which build of the gateway this is."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Final

from proxy import __version__

if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec


def _is_compiled(module: ModuleSpec | None) -> bool:
    return module is not None and module.origin is not None and not module.origin.endswith(".py")


IS_COMPILED: Final = _is_compiled(find_spec("proxy.gateway.request"))
"""What a request runs through is machine code; see OPERATING.md."""
BUILD: Final = f"pdproxy {__version__} (compiled)" if IS_COMPILED else f"pdproxy {__version__}"
"""As people read it."""
