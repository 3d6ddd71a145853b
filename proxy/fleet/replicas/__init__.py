"""Several gateways in front of the same engines, which share their loads through Redis or Valkey.

state      reports of a gateway: read from and written to the workers' shared memory
peers      the reports of other gateways, for as long as they count
store      access to Redis or Valkey
exchange   the loops of the worker that exchanges
"""

from proxy.fleet.replicas.exchange import ExchangeParts, StateExchange
from proxy.fleet.replicas.state import LocalState, PeerRows, SharedRows
from proxy.fleet.replicas.store import Store, StoreError

__all__ = ["ExchangeParts", "LocalState", "PeerRows", "SharedRows", "StateExchange", "Store", "StoreError"]
