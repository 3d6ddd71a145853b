"""HTTP request smuggling: ambiguous requests, through real proxies in front of the gateway.

`scripts/test-smuggling` runs them. All parties must agree: the gateway gives as many answers as the proxy sent
requests, engines see no more requests, and no client gets the answer to another client's bytes.
"""
