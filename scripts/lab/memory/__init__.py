"""scripts/memory: the memory of thousands of slow streams, and of clients that read nothing."""
