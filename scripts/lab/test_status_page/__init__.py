"""`scripts/test-status-page`: what the status page shows in a real browser."""
