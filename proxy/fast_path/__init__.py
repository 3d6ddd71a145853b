"""The fast path: a plain request is one object that things happen to, from its first byte to the last of its answer.

No task, no future, and none of aiohttp. What is not plain takes the road of all other requests: a connection on which
anything else comes than plain requests for the hot routes is aiohttp's until the next one of these, and what has to
wait, an attempt that fails, or a client that reads slowly is the attempt loop's (`flow/attempts.py`). Both roads are
built of the same parts, so only the order of the steps around them is written twice; `tests/fast_path` holds the two
equal.
"""
