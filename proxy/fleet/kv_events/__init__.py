"""KV events that engines publish about their prefix caches, as a source for choices.

blocks          cached blocks of one rank, and the reach of its cache
subscriber      the process that subscribes
messages        messages between that process and a worker
subscriptions   the worker's side: endpoints of instances, reports and warnings
"""
