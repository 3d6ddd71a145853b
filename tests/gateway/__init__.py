"""Requests, from the client's bytes to the end of the answer; both HTTP readers do the same."""
