"""`pdproxy top`: what a running gateway does, as a table that renews itself, from two scrapes of its /metrics."""

from proxy.tools.top.command import main

__all__ = ["main"]
