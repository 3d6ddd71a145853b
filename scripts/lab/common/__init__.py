"""Code that several commands of scripts/ share.

invocation   setup of a command: signals, limits, the directory where it was called
  processes    start, await and stop programs; proc: read their CPU time, memory and files from the kernel
  fleet        engines, gateways and other programs that stop together
  environment  .venv-bench, where other programs are installed; peers: the programs that are compared
  toxics       a TCP proxy that delays, cuts and drops
  engines      engines that cost next to nothing and follow a script; load: clients that check every answer
  output       tables of text and SVG documents
"""
