"""Programs that use client libraries against the gateway, run in an environment with the libraries.

Each takes the gateway's port and prints a summary. Any problem is an error.
"""
