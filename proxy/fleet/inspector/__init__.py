"""Whether instances fit each other and this gateway: what they say they are, and what becomes of handed-over KV."""

from proxy.fleet.inspector.inspector import Inspector
from proxy.fleet.inspector.telling import log_misfit
from proxy.fleet.inspector.transfers import InspectorParts

__all__ = ["Inspector", "InspectorParts", "log_misfit"]
