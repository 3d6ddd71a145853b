"""What operators can see: logs, metrics, traces, and the records and receipts of requests."""
