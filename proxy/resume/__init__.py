"""How an answer whose decoder was lost goes on with another one: decisions only, no IO.

The Transcript knows what the client has, a Seam joins the stream of the next decoder to it.
"""
