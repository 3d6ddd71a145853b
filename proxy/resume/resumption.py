"""The decision on an answer whose decoder was lost. No IO."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from proxy.call import Call
    from proxy.resume.seam import Seam
    from proxy.terms import Action


@dataclass(frozen=True, slots=True)
class Resumption:
    """How an answer goes on. `call` None: it is over, for length. `seam` None: it begins anew, unseen."""

    action: Action
    call: Call | None
    seam: Seam | None = None
    kept: int = 0
    """Token ids of the answer that need not be generated again."""
    prompt_ids: bytes | None = None
    """What the engine must say its prompt was, if it obeys; a JSON array."""
