"""What an engine's hardware makes of its work: how long a step takes, and how much KV fits. Pure: no IO and no clock.

The same parts serve simulated engines, which live in real time, and scripts/replay, which lives in virtual time.
"""
