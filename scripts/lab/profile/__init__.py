"""scripts/profile: distribution of the CPU time of requests and tokens."""
