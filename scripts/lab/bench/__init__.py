"""scripts/bench: the CPU time of requests and tokens, for pdproxy and other programs.

scenarios    loads: what clients send, how often, and how large
  load         sends requests and checks every answer, in a process per measurement
  course       starts programs when they are needed, and measures them; figures are computed from measurements
  duel         measures two programs at the same time on one core
  kinds        compares other kinds of requests with a chat
  report       a table of figures, ratios and targets, and CPU time as bars
"""
