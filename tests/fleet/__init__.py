"""The gateway's knowledge of engines, and of other gateways."""
