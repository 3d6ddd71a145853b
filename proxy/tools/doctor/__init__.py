"""`pdproxy doctor`: examine every engine and every pair, and report incompatibilities.

Each check is a function in the table of its group (`engine.py`, `fleet.py`, `pair.py`, `gateway.py`).
`asking.py` and `fleet.canary` query the engines, in the order of `examination.py`.
"""

from proxy.tools.doctor.command import main

__all__ = ["main"]
