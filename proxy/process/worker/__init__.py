"""One worker process: it builds all parts, listens, drains and stops. Parts are put together only here."""

from proxy.process.worker.assembly import Worker, build
from proxy.process.worker.process import listening, run

__all__ = ["Worker", "build", "listening", "run"]
