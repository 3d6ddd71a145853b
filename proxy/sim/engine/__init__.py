"""A simulated engine: `SimulatedEngine` in this process, `main` as a program."""

from proxy.sim.engine.simulated import SimulatedEngine, main

__all__ = ["SimulatedEngine", "main"]
