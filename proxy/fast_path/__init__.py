"""The road of every request that is generated for: from the client's bytes to the end of its answer.

* Connection: reads plain requests from a client. aiohttp reads all others (api/generation.py).
* Intake: turns a body into a Call, and a Call into a Request.
* Request: serves one request, driven by the callbacks of its connections.
* RequestParts: what the requests of one lane are made of.
"""
