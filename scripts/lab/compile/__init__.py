"""The gateway as machine code."""
