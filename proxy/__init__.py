"""A gateway for disaggregated prefill and decode: one OpenAI-compatible endpoint in front of many engines.

The nouns, used in this sense everywhere; DESIGN.md has the same list:

Role         `prefill`, `decode` or `encode`; an instance of it is a prefiller, a decoder or an encoder
Backend      one engine endpoint: role, host, port, scoreboard slot; a frozen value
Roster       which backends there are, the same for all workers: joining, enabled, disabled, draining
Pool         the backends of one role; the only one that knows which are eligible now
Lane         what serves the requests for some models, from the queue to the pools; one for all, if all serve the same
Load         what a request costs a backend, in whole tokens: `compute` (being worked on) and `kv` (cache it holds)
Scoreboard   load per backend across workers; each worker writes its own row
PickRequest  what a backend is wanted for: its cost, which backends to avoid or prefer, what else is known
Policy       given a request, the eligible backends and their loads, choose one
Tracker      how a policy follows a request that it has sent to a backend
Lease        one request's claim on one backend; leaving it gives the load back and reports how it went
Health       what probes and the outcomes of requests say about a backend
PairQuarantine prefillers and decoders between which hand-overs fail, kept apart
Incompatibility a way in which a healthy backend does not match the others or this gateway; logged once
PinnedKv     KV cache that prefillers keep although no decoder will fetch it
Dialect      one API that clients speak: how its requests become calls, and answers become its bytes
Call         one parsed client request; immutable, knows its cost
AdmissionQueue the queue in front of the pools: calls wait there until there is room for them
Request      one client request, from its body to the end of its answer; callbacks of connections drive it
LegDriver    sends the legs of one attempt from the callbacks of their connections
AttemptLoop  one unit's further attempts, in a task: the only place that repeats or resumes
Connector    one KV-transfer protocol: which payloads, in which order, both in one file
Attempt      one try at a call: the decoder's open response, and the KvHandoff behind it
Leg          one request to one engine; an attempt is a generator of them, or of a Pair at a time, which somebody drives
KvHandoff    the way of one attempt's KV cache from prefiller to decoder, and what follows from how it ends
Segment      the reader of one decoder's stream: what each event means, and what the stream has told so far
Answer       one unit's answer in the making: how it is taken from an attempt; has a Delivery
Transcript   the client's answer so far, over all segments: its text and token ids
Delivery     what the client has of one answer; the only one that gives it more
Seam         how the stream of another decoder is joined to what the client has
Suspicion    what is known of one client request under which engines went down, for all of its units
Canary       a prompt of the gateway's own that shows whether a hand-over between two engines works
Topology     a fleet as its operator describes it: nodes, roles, groups of ranks; commands and configuration follow
RequestRecord what happened to one request, for its log line and the metrics; it has a Timeline for each unit
Trace        what a sampled request's spans are made of beside its record: its ids, and the legs sent for it
Receipts     what operators can still read of requests that are over: the access line, and why each attempt went where
"""

__version__ = "0.1.0"
SERVER = "pdproxy"
"""How this gateway signs its answers, and so knows its own kind."""
