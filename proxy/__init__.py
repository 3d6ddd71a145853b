"""A gateway for disaggregated prefill and decode: one OpenAI-compatible endpoint in front of many engines.

The nouns, used in this sense everywhere:

Backend     one engine endpoint: role, host, port, scoreboard slot; a frozen value
Role        `prefill` or `decode`; an instance of it is a prefiller or a decoder
Load        what a request costs a backend, in whole tokens: `compute` (being worked on) and `kv` (cache it holds)
Pool        the backends of one role; the only one who knows which are eligible now
Policy      given eligible backends and their loads, choose one; pure
Lease       one request's claim on one backend; leaving it gives the load back and reports how it went
Scoreboard  load per backend across workers; each worker writes its own row
Health      what probes and the outcomes of requests say about a backend
Misfit      in what a backend that is well does not fit the others or this gateway; noticed, told once, never judged
Call        one parsed client request; immutable, knows its cost
Connector   one KV-transfer protocol: which payloads, in which order, both in one file
Attempt     one try at a call: the decoder's open response and the leases behind it
Segment     what one decoder's stream has told so far
Transcript  the client's answer so far, over all segments: its text and token ids
Delivery    what the client has of one answer; the only one who gives it more
Suspicion   what is known of one client request under which engines went down, for all of its units
Seam        how the stream of another decoder is joined to what the client has
"""

__version__ = "0.1.0"
SERVER = "pdproxy"
"""How this gateway signs its answers, and so knows its own kind."""
