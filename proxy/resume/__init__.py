"""Decides how another decoder continues an answer whose decoder was lost. No IO.

* Transcript: the part of the answer that the client has, and its token ids.
* plan: makes a Resumption of a Situation.
* Seam: joins the stream of the next decoder to the client's stream.
* Engine: how an engine software reports answers and continues them.
"""
