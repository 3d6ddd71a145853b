"""Requests that two servers may read in two ways, through real proxies in front of the gateway: scripts/test-smuggling.

What counts is not who refuses what, but that all agree: the gateway gives as many answers as the proxy sent requests,
engines see no more of them, and nobody ever gets the answer to bytes that somebody else wrote.
"""
