"""Several gateways in front of the same engines, which tell each other their loads through Redis or Valkey.

gateway_state.py  what a gateway reports, as bytes
local_state.py    what this gateway has to report
peers.py          the reports of the others, for as long as they count
peer_rows.py      the same in rows of shared memory, where picks look
store.py          the only place that knows the store
exchange.py       the loops of one worker
"""

from proxy.fleet.replicas.exchange import ExchangeParts, StateExchange
from proxy.fleet.replicas.local_state import LocalState
from proxy.fleet.replicas.peer_rows import PeerRows, SharedRows
from proxy.fleet.replicas.port import StoreFailed
from proxy.fleet.replicas.store import Store

__all__ = ["ExchangeParts", "LocalState", "PeerRows", "SharedRows", "StateExchange", "Store", "StoreFailed"]
