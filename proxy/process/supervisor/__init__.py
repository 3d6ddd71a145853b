"""Keeps the workers alive.

One worker runs in this process. Several are forked and share the listening sockets, the configuration, the scoreboard
and the roster; one that dies, or stands still for too long, is replaced, and what it had counted is erased. The
supervisor itself serves nothing and has no event loop: it waits for a signal, passes it on, picks up a dead worker, or
looks whether the living ones work. When it dies itself, its pipe to the workers closes and they leave.
"""

from proxy.process.supervisor.supervisor import RestartPolicy, serve

__all__ = ["RestartPolicy", "serve"]
