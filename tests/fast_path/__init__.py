"""The fast path accepts only what is plain, costs what it may, and does what the road of other requests does."""
