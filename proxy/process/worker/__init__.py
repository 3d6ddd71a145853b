"""One process: build each part once, listen, drain, stop. The only place where the parts are put together."""

from proxy.process.worker.assembly import Worker, build
from proxy.process.worker.listening import listening
from proxy.process.worker.process import run

__all__ = ["Worker", "build", "listening", "run"]
