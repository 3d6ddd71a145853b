"""Conversations through a gateway, compared byte by byte with recordings.

* Conversation: requests of clients and faults of engines (`answers.py`, `failures.py`, `refusals.py`, `leaving.py`).
* Course: the effects of a conversation as text: bytes to clients and to engines, changed metrics, the access log.
* Recording: a file in `conversations/` with two courses, with `listen.fast_path` on and off. Lines with `+` are only
  in the first, lines with `-` only in the second. `[12]abc[34]` is a line that differs from the line before in `abc`:
  12 characters before it and 34 behind it are the same.

`.venv/bin/python -m tests.recorded [NAME ...]` writes the recordings again.
"""
