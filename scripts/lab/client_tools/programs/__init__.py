"""What clients' libraries do with the gateway, one program each; run by an environment that has the libraries.

Each takes the gateway's port, and says what it has done; what goes wrong ends it with an error.
"""
