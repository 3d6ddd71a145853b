"""scripts/replay: send a trace of requests through the gateway's balancer, in virtual time."""
