"""Finds the cut of an answer: the number of its token ids that need not be generated again. No IO.

The cut may depend on the text of token ids, which only engines know. Functions that need this text are generators: they
yield the ids and receive the text.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Callable, Collection, Generator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeVar

import orjson

from proxy.dialects.grammars import PROMPT_TAIL_TOKENS
from proxy.resume.engines import CannotResume
from proxy.resume.overlap import AnswerMismatch

if TYPE_CHECKING:
    from proxy.resume.situation import Situation
    from proxy.resume.transcript import Transcript

# How many ids at the end may be taken away, one after the other, to find where the answer can be cut.
_MAX_DETOKENIZATIONS: Final = 32
# No character has more tokens than bytes. With as many before it again, what it begins with is whole.
_MAX_IDS_OF_CHARACTER: Final = 8
# How many kinds of special tokens an answer may have that its text does not show.
_MAX_HIDDEN_TOKEN_KINDS: Final = 4
# Such as `<|im_end|>`, `</s>` and `[EOS]`.
_match_special_token: Final = re.compile(r"<.+>|\[.+\]", re.DOTALL).search

UNFINISHED_CHARACTER_MARK: Final = "\N{REPLACEMENT CHARACTER}"
"""The end of a text with an incomplete character. If a prompt ends so, the engine repeats all of it (vLLM 0.32)."""

T = TypeVar("T")
Steps = Generator[Sequence[int], str | None, T]
"""A generator that yields token ids, receives their text (None if it is not available), and returns a T."""


@dataclass(frozen=True, slots=True)
class Cut:
    """The place where an answer is cut. The first `kept_ids` token ids become part of the prompt."""

    kept_ids: int
    held_text: str = ""
    """The last part of the text of the kept ids. The client does not have this part yet."""
    deferred_text: str = ""
    """White space after `held_text`, which the client gets only if more text of the same kind follows."""
    channel: str = "content"
    """The member of a chat's delta to which this text and the next text belong."""
    known_text: str = ""
    """The text after the text of the kept ids. The client already has it, and the engine generates it again."""


def find_cut(
    situation: Situation,
    compare: Callable[[str], tuple[dict[str, Any], str]],
    *,
    channel: str = "content",
    may_lag: bool = False,
    may_hide: bool = False,
) -> Steps[Cut]:
    """Find the number of an answer's token ids that the next call keeps. Raises CannotResume.

    Ids that showed no text are generated again. The client's text may lag behind the ids for three reasons: it may be
    the beginning of a stop string, a chunk had several ids, or an engine shows a part of a token's text. Then the
    text of the ids decides.

    Args:
        situation: The answer to cut.
        compare: Returns the part of a text that the client does not have, and the deferred part. Raises AnswerMismatch
            if the answer cannot be cut after this text.
        channel: The member of the delta in which the answer broke off.
        may_lag: Whether the text may lag behind the ids for another reason.
        may_hide: Whether the text may lack special tokens.
    """
    transcript, stops = situation.transcript, situation.call.stop_strings
    may_hold = max(map(len, stops), default=0) > 1
    shown = transcript.content_text or transcript.reasoning_text
    may_lag = (
        may_lag
        or transcript.count_shown_ids - transcript.first_id_of_chunk > 1
        or shown.endswith(UNFINISHED_CHARACTER_MARK)
    )
    if not (may_hold or may_lag):
        settled = transcript.count_shown_ids
        if not situation.engine.shows_half_tokens:
            return Cut(settled, channel=channel)
        end = yield from detokenize(transcript, settled, begin=max(0, settled - _MAX_IDS_OF_CHARACTER))
        if not end.endswith(UNFINISHED_CHARACTER_MARK):
            return Cut(settled, channel=channel)
    kept, least = (len(transcript.ids), 0) if may_hold else (transcript.count_shown_ids, transcript.first_id_of_chunk)
    # The engine held text back, and so did this gateway where answers were joined before.
    most_held = 2 * max(map(len, stops), default=1) - 2
    hidden: set[int] = set()
    while kept >= max(least, len(transcript.ids) - _MAX_DETOKENIZATIONS):
        text = yield from detokenize(transcript, kept, hidden=hidden)
        if (
            situation.engine.shows_half_tokens
            and not text.endswith(UNFINISHED_CHARACTER_MARK)
            and shown.startswith(text)
        ):
            return Cut(kept, channel=channel, known_text=shown[len(text) :])
        with suppress(AnswerMismatch):
            new, deferred = compare(text)
            held = new.pop(channel, "")
            if not new and len(held) <= most_held and not text.endswith(UNFINISHED_CHARACTER_MARK):
                return Cut(kept, held, deferred, channel)
        if may_hide:
            may_hide = False
            hidden = yield from find_hidden_ids(transcript, kept, text, shown)
            if hidden:
                continue
        kept -= 1
    raise CannotResume("the token ids do not match the text the client has")


def detokenize(transcript: Transcript, kept: int, begin: int = 0, hidden: Collection[int] = ()) -> Steps[str]:
    """Return the text of an answer's ids from `begin` until `kept`, without the ids in `hidden`.

    Raises CannotResume.
    """
    ids = transcript.ids[begin:kept]
    if hidden:
        ids = array(ids.typecode, [token for token in ids if token not in hidden])
    text = (yield ids) if ids else ""
    if text is None:
        raise CannotResume("no engine detokenized the answer's token ids")
    return text


def find_hidden_ids(transcript: Transcript, kept: int, text: str, shown: str) -> Steps[set[int]]:
    """Find the special tokens among an answer's first `kept` ids that are missing in `shown`, the client's text.

    Empty if no token is missing, or if the missing tokens are not found. `text` is the text of the ids. The search for
    each token halves the answer repeatedly, and asks for about ten texts. Raises CannotResume.
    """
    hidden: set[int] = set()
    while not _agree_as_prefixes(text, shown):
        if len(hidden) == _MAX_HIDDEN_TOKEN_KINDS or not _match_special_token(text):
            return set()
        # The text of the first `low` ids agrees with `shown`, and that of the first `high` ids does not.
        low, high = 0, kept
        while high - low > 1:
            middle = (low + high) // 2
            agrees = _agree_as_prefixes((yield from detokenize(transcript, middle, hidden=hidden)), shown)
            low, high = (middle, high) if agrees else (low, middle)
        if not _match_special_token((yield from detokenize(transcript, high, low))):
            return set()
        hidden.add(transcript.ids[low])
        text = yield from detokenize(transcript, kept, hidden=hidden)
    return hidden


def _agree_as_prefixes(text: str, shown: str) -> bool:
    """Return whether one text begins with the other. An incomplete character at the end is ignored."""
    text = text.rstrip(UNFINISHED_CHARACTER_MARK)
    return shown.startswith(text) or text.startswith(shown)


def detokenize_prompt_tail(transcript: Transcript) -> Steps[str]:
    """Return the text of the end of the prompt. Raises CannotResume."""
    assert transcript.prompt_ids is not None
    tail = yield orjson.loads(transcript.prompt_ids)[-PROMPT_TAIL_TOKENS:]
    if tail is None:
        raise CannotResume("no engine detokenized the prompt's token ids")
    return tail
