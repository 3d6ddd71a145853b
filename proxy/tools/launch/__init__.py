"""`pdproxy launch`: one description of a fleet gives the commands of each node and the gateway's configuration.

`topology.py` is the file that people write, `plan.py` what each node starts by it, `refusals.py` what would not work.
`vllm_ascend.py`, `sglang.py` and `gateway.py` write what is started.
"""

from proxy.tools.launch.command import main

__all__ = ["main"]
