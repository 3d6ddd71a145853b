"""Version of the running build, and whether it is compiled."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Final

from proxy import __version__

if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec


def _is_compiled_module(module: ModuleSpec | None) -> bool:
    return module is not None and module.origin is not None and not module.origin.endswith(".py")


IS_COMPILED: Final = _is_compiled_module(find_spec("proxy.gateway.request"))
"""Whether the code on the path of a request is compiled; see docs/get-started/install.md."""
BUILD_KIND: Final = f"pdproxy {__version__} ({'compiled' if IS_COMPILED else 'interpreted'})"
"""Name, version and kind of the build for log lines and `--version`."""
