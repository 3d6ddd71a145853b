"""Several gateways in front of the same engines, which tell each other their loads through Redis or Valkey.

told.py      what a gateway tells, as bytes
peers.py     what the others have told, for as long as it counts
store.py     the only place that knows the store
exchange.py  the loop of one worker, which writes what others have told into the guests' rows of shared memory
"""

from proxy.replicas.exchange import Exchange
from proxy.replicas.store import Store, StoreFailed

__all__ = ["Exchange", "Store", "StoreFailed"]
