"""Tests of requests, from the client's bytes to the end of the answer, with both HTTP readers."""
