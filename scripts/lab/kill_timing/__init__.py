"""The measurement behind scripts/kill-timing: for how long requests go to an engine that is dead, and who sees it.

sniffer     connections to one port, as the kernel sees them
requests    clients that ask at a fixed rate, and what went wrong for them
"""
