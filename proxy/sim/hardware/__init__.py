"""The hardware of an engine: the time of a step, and the size of KV memory. Pure: no IO and no clock.

Simulated engines use it in real time, and scripts/replay in virtual time.
"""
