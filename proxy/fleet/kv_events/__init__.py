"""What engines publish of their KV caches, and what follows from it for those who choose among them.

blocks.py         the blocks of one rank, and how far back its cache reaches
subscription.py   the sockets of one rank, and messages that were lost
subscriber.py     the process that has all of these
messages.py       what it is told, and tells
sources.py        where an instance publishes
subscriptions.py  starts that process, and says of whom events are heard and what workers and operators are told
"""
