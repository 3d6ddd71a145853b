"""`pdproxy advise`: the bottleneck of the fleet, and the effect of moving one instance to it."""

from proxy.tools.advise.command import main

__all__ = ["main"]
