"""`pdproxy launch`: commands of each node and the gateway's configuration, from one description of a fleet.

`topology.py` reads the description, `plan.py` derives the processes of each node, and `refusals.py` finds mistakes.
`vllm.py`, `sglang.py` and `gateway.py` render the files.
"""

from proxy.tools.launch.command import main

__all__ = ["main"]
