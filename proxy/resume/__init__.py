"""How an answer whose decoder was lost goes on with another one: decisions only, no IO.

* Transcript: what the client has, and the token ids behind it.
* plan: makes a Resumption of a Situation.
* Seam: joins the stream of the next decoder to the client's stream.
* Engine: how an engine software tells an answer and takes it up again.
"""
