"""A gateway for disaggregated prefill and decode: one OpenAI-compatible endpoint in front of many engines.

process     the supervisor and its workers
tools       sub-commands for operators
api         routes
gateway     the course of a request, from its body to the end of its answer
connectors  KV-transfer protocols
dialects    APIs of clients
resume      continuation of broken answers
fleet       discovery, probes and checks of engines
upstream    connections to engines
listener    connections of clients
observe     logs, metrics, traces and receipts
balancer    choice of instances
wire        formats of requests and answers
settings    options
common      types that several packages use
sim         simulated engines

DESIGN.md has the nouns, the life of a request, and the decisions.
"""

__version__ = "0.1.0"
SERVER = "pdproxy"
"""Name of the gateway in the header Server, by which gateways recognise each other."""
