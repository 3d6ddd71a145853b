"""What every package may use: Backend, errors, endpoints, terms, background tasks.

Nothing in here imports another package of the gateway.
"""
