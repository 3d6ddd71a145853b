"""The HTTP routes that clients and operators call."""
