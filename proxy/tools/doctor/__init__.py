"""`pdproxy doctor`: asks every engine what it is, sends a canary through every pair, and says what does not fit.

Each check is a function in the table of its group (`engine.py`, `fleet.py`, `pair.py`, `gateway.py`), and makes
Findings of what it is given. Engines are asked by `asking.py` and `fleet.canary`, in the order of `examination.py`.
"""

from proxy.tools.doctor.command import main

__all__ = ["main"]
