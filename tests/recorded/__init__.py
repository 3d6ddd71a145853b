"""Conversations through a gateway, compared byte by byte with what was recorded.

* Conversation: what clients and engines do, in `answers.py`, `failures.py`, `refusals.py` and `leaving.py`.
* Course: what it comes to, as text: bytes for clients and for engines, changed metrics, the access log.
* Recording: a file in `conversations/` with the courses with `listen.fast_path` on and off.

`.venv/bin/python -m tests.recorded [NAME ...]` writes the recordings again.
"""
