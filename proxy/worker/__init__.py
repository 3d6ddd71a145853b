"""One process: build each part once, listen, drain, stop. The only place where the parts are put together."""

from proxy.worker.assembly import Worker, build
from proxy.worker.listening import listening
from proxy.worker.process import run

__all__ = ["Worker", "build", "listening", "run"]
