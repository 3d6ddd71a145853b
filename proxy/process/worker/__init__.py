"""One worker process: it builds all parts, listens, drains and stops. Parts are put together only here."""

from proxy.process.worker.assembly import Worker, build_worker
from proxy.process.worker.process import listening, run_worker

__all__ = ["Worker", "build_worker", "listening", "run_worker"]
