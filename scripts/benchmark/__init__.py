"""The benchmark behind scripts/bench: what a request and a token cost, for this gateway and for a peer beside it.

scenarios   what is asked for, how often and how large
engines     simulated engines, cheap enough not to be the bottleneck (a process of its own)
load        asks, and checks every answer (a process of its own for each measurement)
peers       the programs that are compared, and how each is started
processes   start, stop, CPU time
report      medians and ratios in one table
"""
