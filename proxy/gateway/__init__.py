"""Serves requests, from the client's bytes to the end of the answer.

* FastConnection reads plain requests from a client. aiohttp reads all others (api/generation.py).
* Intake turns a body into a Call, and a Call into a Request.
* Request serves one client request. The callbacks of its connections drive it.
* AdmissionQueue queues requests until an instance has room. Each Lane has its own queue.
* RequestService splits a request into units. AttemptLoop repeats or resumes a unit.
* UnitAnswer is the answer to one unit: Relay reads the decoder's stream, Delivery decides what the client gets, and
  ClientWriter writes it.
"""
