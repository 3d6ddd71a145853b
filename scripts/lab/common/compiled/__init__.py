"""The gateway once more, with what requests run through compiled."""

from lab.common.compiled.build import COMPILED, NotCompiled, compiled

__all__ = ["COMPILED", "NotCompiled", "compiled"]
