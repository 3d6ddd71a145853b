"""`pdproxy advise`: which side of the fleet is the bottleneck, and what moving one instance to it would do."""

from proxy.tools.advise.command import main

__all__ = ["main"]
