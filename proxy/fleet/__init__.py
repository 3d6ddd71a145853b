"""Knows the engines: their addresses, their health, and their incompatibilities.

discovery   sources of instances, and their health probes
inspector   incompatible instances, found in the reports and counters of engines
canary      test prompts that the gateway sends through its connector
kv_events   events that engines publish about their KV caches
replicas    other gateways in front of the same engines
"""
