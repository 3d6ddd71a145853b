"""Self-monitoring of a worker, and a thread that answers probes while the event loop is busy."""

from proxy.process.monitor.loop_lag import LoopLag
from proxy.process.monitor.monitor import Monitor, MonitorParts, Overload, overload_of
from proxy.process.monitor.probes import ProbeServer
from proxy.process.monitor.usage import Memory, OpenFds

__all__ = ["LoopLag", "Memory", "Monitor", "MonitorParts", "OpenFds", "Overload", "ProbeServer", "overload_of"]
