"""The processes of a gateway: one supervisor, and workers that serve.

supervisor      starts workers and replaces them
worker          makes the parts of one worker and puts them together
configuration   the configuration in force, the same for all workers
monitor         a worker's event loop and memory, and its answers to probes
shared          sockets and memory that workers inherit
takeover        sockets that one gateway passes to the next
"""
