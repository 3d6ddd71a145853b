"""Whether engines fit each other: hand-overs that arrive, KV that stays pinned, setups that cannot work together."""
