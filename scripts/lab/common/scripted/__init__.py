"""Engines that do as each request says, and thousands of clients that check: for scripts/pick-error and scripts/memory.

engines     prefillers and decoders in one process, which note what reaches them
clients     streams whose every answer is checked
programs    the engines and the gateway, started and stopped
"""
