"""Several gateways in front of the same engines, which tell each other their loads through Redis or Valkey.

told.py      what a gateway tells, as bytes
own.py       what this one has to tell
peers.py     what the others have told, for as long as it counts
guests.py    what they have told, in the guests' rows of shared memory, where picks look
store.py     the only place that knows the store
exchange.py  the loops of one worker, which has all of that done
"""

from proxy.replicas.exchange import Exchange
from proxy.replicas.guests import Guests
from proxy.replicas.own import Own
from proxy.replicas.port import StoreFailed
from proxy.replicas.store import Store

__all__ = ["Exchange", "Guests", "Own", "Store", "StoreFailed"]
