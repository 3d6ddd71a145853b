"""Where an answer is cut: how much of it need not be generated again. No IO."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from proxy.resume.overlap import Mismatch
from proxy.resume.resumption import CannotResume
from proxy.resume.token_text import hidden_ids, text_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from proxy.resume.situation import Situation
    from proxy.resume.token_text import Steps

# How many ids at the end may be taken away, one after the other, to find where the answer can be cut.
_MAX_QUESTIONS: Final = 32
# No character has more tokens than bytes. With as many before it again, what it begins with is whole.
_IDS_OF_CHARACTER: Final = 8
UNFINISHED: Final = "\N{REPLACEMENT CHARACTER}"
"""What the text of an unfinished character ends in. An engine whose prompt ends so repeats all of it (vLLM 0.32)."""


@dataclass(frozen=True, slots=True)
class Cut:
    """Where an answer is cut: `kept` token ids go on as prompt."""

    kept: int
    held: str = ""
    """The end of their text, which the client does not have."""
    deferred: str = ""
    """White space behind that, which the client is to get if more text of its kind follows."""
    channel: str = "content"
    """The member of a chat's delta that this text, and what follows, belongs to."""
    known: str = ""
    """Text behind that of the kept ids, which the client has: it is generated again."""


def find_cut(
    situation: Situation,
    compare: Callable[[str], tuple[dict[str, Any], str]],
    *,
    channel: str = "content",
    may_lag: bool = False,
    may_hide: bool = False,
) -> Steps[Cut]:
    """How many ids to keep.

    What showed nothing is generated again. But where the text that was shown may lag behind the ids, since there are
    stop strings that it may be the beginning of, since a chunk had several ids, or since an engine shows a part of a
    token's text, only the ids' text can tell.
    `compare`: what of a text the client does not have, and what is deferred; raises Mismatch where the answer cannot be
    cut. `channel`: where the answer broke off. `may_lag`: the text may do so for another reason. `may_hide`: it may
    lack special tokens.
    """
    transcript, stops = situation.transcript, situation.call.stops
    may_hold = max(map(len, stops), default=0) > 1
    shown = transcript.content or transcript.reasoning
    may_lag = may_lag or transcript.settled - transcript.chunk_start > 1 or shown.endswith(UNFINISHED)
    if not (may_hold or may_lag):
        settled = transcript.settled
        if not situation.engine.shows_half_tokens:
            return Cut(settled, channel=channel)
        end = yield from text_of(transcript, settled, begin=max(0, settled - _IDS_OF_CHARACTER))
        if not end.endswith(UNFINISHED):
            return Cut(settled, channel=channel)
    kept, least = (len(transcript.ids), 0) if may_hold else (transcript.settled, transcript.chunk_start)
    # What the engine held back, and what this gateway did where answers were joined before.
    most_held = 2 * max(map(len, stops), default=1) - 2
    hidden: set[int] = set()
    while kept >= max(least, len(transcript.ids) - _MAX_QUESTIONS):
        text = yield from text_of(transcript, kept, hidden=hidden)
        if situation.engine.shows_half_tokens and not text.endswith(UNFINISHED) and shown.startswith(text):
            return Cut(kept, channel=channel, known=shown[len(text) :])
        with suppress(Mismatch):
            new, deferred = compare(text)
            held = new.pop(channel, "")
            if not new and len(held) <= most_held and not text.endswith(UNFINISHED):
                return Cut(kept, held, deferred, channel)
        if may_hide:
            may_hide = False
            hidden = yield from hidden_ids(transcript, kept, text, shown)
            if hidden:
                continue
        kept -= 1
    raise CannotResume("the token ids do not match the text the client has")
