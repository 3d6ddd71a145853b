"""The KV transfer protocols of simulated engines, one file for each protocol.

`engine.simulated.PROTOCOLS` names them.
"""
