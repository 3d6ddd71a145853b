"""scripts/test-status-page: test the status page in a real browser."""
