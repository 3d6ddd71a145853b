"""Simulated engines for the demo, the tests and the benchmarks.

* `engine`: the program and its parts.
* `kv`: how engines transfer KV, one file for each protocol.
* `dialects`: the requests and answers of vLLM and SGLang.
* `model`: the deterministic model that generates tokens.
* `hardware`: the time that work takes on a machine. It needs no engine.
* `Options`, `Profile` and `State` belong to all of them.
"""
