"""The benchmark behind scripts/bench: what a request and a token cost, for this gateway and for others beside it.

scenarios    what is asked for, how often and how large
load         asks and checks every answer (a process of its own for each measurement)
course       starts programs when they are needed, and measures them; duel: two of them at the same time on one core
kinds        what other kinds of requests cost beside a chat, in one table
figures      what is told of a scenario, and how it is got from what was measured
report       figures, ratios and targets in one table, and CPU time as bars
"""
