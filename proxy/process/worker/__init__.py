"""One worker process: it builds all parts, listens, drains and stops. Parts are put together only here."""

from proxy.process.worker.assembly import Worker, build
from proxy.process.worker.listening import listening
from proxy.process.worker.process import run

__all__ = ["Worker", "build", "listening", "run"]
