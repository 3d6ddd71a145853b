"""Memory that all workers of a gateway inherit, and what they record there for each other."""
