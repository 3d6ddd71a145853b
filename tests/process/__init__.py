"""The supervisor, workers, and what they share."""
