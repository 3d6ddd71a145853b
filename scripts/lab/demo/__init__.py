"""scripts/demo: one streamed answer through simulated engines."""
