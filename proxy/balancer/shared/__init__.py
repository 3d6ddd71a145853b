"""What all workers of a gateway know of each other: memory that they inherit, and what they write there."""
