"""Callers: clients that show a key, and the limits of each."""
