"""How KV travels between simulated engines: one file per protocol. `engine.simulated.PROTOCOLS` names them."""
