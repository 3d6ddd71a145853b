"""Discovery by DNS, with a real name server."""
