"""Types and helpers for all packages: Backend, errors, endpoints, terms, background tasks.

This package imports no other package of the gateway.
"""
