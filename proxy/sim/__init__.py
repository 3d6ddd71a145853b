"""Simulated engines: the demo, the tests and the benchmarks all use these."""
