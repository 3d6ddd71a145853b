"""scripts/profile: where the CPU time of a request and of a token goes."""
