"""What an engine's KV events say of its cache, in numbers: how much it has stored, and how far back it reaches.

Events name blocks by hashes of token ids, which a gateway without a tokenizer cannot compute of a prompt. But engines
evict what was used least recently, so it is enough to know how long ago that was of what is evicted now. Counts are
written into the journal, where policies hear of what other workers do anyhow.
"""

from __future__ import annotations

from typing import NamedTuple


class CacheCount(NamedTuple):
    """Of one backend, since its events are heard. A later one replaces an earlier one, so some may be lost."""

    stored: float
    """Tokens whose KV was put into the cache. Less than before: counting has begun again."""
    reach: float
    """Tokens that are stored between the last use of a block and its eviction, as CachedPrefixes counts them."""
    evicts: float
    """Whether that was seen at evictions; 0: the cache reaches back so far at least."""
    cleared: float
    """How often it was emptied at once."""
