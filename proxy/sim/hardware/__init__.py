"""Computes the time of an engine's steps and the use of its KV memory. No IO and no clock.

Simulated engines use it in real time, and scripts/replay in virtual time.
"""
