"""Simulated engines: the demo, the tests and the benchmarks all use these.

`engine` is the program and its parts; below it stand `kv`, how KV travels between engines (one file per protocol), and
`dialects`, what vLLM and SGLang read and write; below those `model`, which makes tokens out of tokens. `Options`,
`Profile` and `State` are for all of them. `hardware` is how long work takes on which machine, with no engine around.
"""
