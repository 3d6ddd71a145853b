"""`pdproxy doctor`: examine every engine and every pair, and report incompatibilities.

Each check is a function in the table of its group (`engine.py`, `fleet.py`, `pair.py`, `gateway.py`).
`examination.py` queries the engines, in part by `fleet.canary`, and runs the checks.
"""

from proxy.tools.doctor.command import main

__all__ = ["main"]
