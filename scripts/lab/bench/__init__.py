"""The benchmark behind scripts/bench: what a request and a token cost, for this gateway and for others beside it.

scenarios    what is asked for, how often and how large
engines      simulated engines, cheap enough not to be the bottleneck (a process of its own); answers: what they send
load         asks (a process of its own for each measurement); client: one connection, which checks every answer
loads        several of those processes at the same time
rivals       who takes part besides lab.common.peers, and in which scenarios
course       starts programs when they are needed, and measures them; duel: two of them at the same time on one core
kinds        what other kinds of requests cost beside a chat, in one table
figures      what is told of a scenario, and how it is got from what was measured; histogram: durations
report       figures and ratios in one table
targets      what this gateway has to reach, and whether it does
chart        CPU time as bars
"""
