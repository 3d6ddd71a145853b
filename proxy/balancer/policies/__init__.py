"""Policies that choose among eligible backends, and the values that they learn from answers."""
