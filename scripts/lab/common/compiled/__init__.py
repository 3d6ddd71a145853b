"""A build of the gateway whose modules for requests are compiled by mypyc."""

from lab.common.compiled.build import COMPILED, NotCompiled, compiled

__all__ = ["COMPILED", "NotCompiled", "compiled"]
