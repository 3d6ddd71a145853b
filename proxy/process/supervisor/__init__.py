"""Keeps the workers alive.

One worker runs in this process. Several workers are forked and share the listening sockets, the configuration, the
scoreboard and the roster. A worker that dies or freezes is replaced, and its counts are erased.

The supervisor serves no requests and has no event loop. It waits for signals, passes them on, replaces dead workers,
and checks the others. If the supervisor dies, its pipe to the workers closes, and they stop.
"""

from proxy.process.supervisor.supervisor import RestartPolicy, run_supervisor

__all__ = ["RestartPolicy", "run_supervisor"]
