"""Who of those that are eligible gets a request: the policies, and what they learn from answers."""
