"""HTTP in: the routes clients and operators call."""
