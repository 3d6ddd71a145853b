"""`pdproxy top`: the activity of a running gateway, as a table that refreshes from its /metrics."""

from proxy.tools.top.command import main

__all__ = ["main"]
