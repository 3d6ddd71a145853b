"""scripts/replay: a trace of requests through the gateway's own balancer, in virtual time."""
