"""What engines tell of one unit's tokens, put together from all of its legs and attempts."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

Told = tuple[int | None, int | None]
"""See told_of_prompt."""
# What is below zero in an engine that counts without a sign: added up, it would hide all that comes later.
_TOO_MANY: Final = 1 << 40


class Counts(NamedTuple):
    """The numbers of a usage object; None: it does not tell, or tells something that is no number of tokens."""

    prompt: int | None
    completion: int | None
    cached: int | None
    """Tokens of the prompt that were in the prefix cache."""
    reasoning: int | None
    """Tokens of the completion that are reasoning."""


_NONE: Final = Counts(None, None, None, None)


def counts(usage: Any) -> Counts:
    """Read a usage object, whatever an engine has put in its place.

    Nothing else reads the numbers in one but `Usage` and `told_of_prompt`, which every request asks for less.
    """
    if not isinstance(usage, dict):
        return _NONE
    of_prompt, of_completion = usage.get("prompt_tokens_details"), usage.get("completion_tokens_details")
    return Counts(
        _count(usage.get("prompt_tokens")),
        _count(usage.get("completion_tokens")),
        _count(of_prompt.get("cached_tokens")) if isinstance(of_prompt, dict) else None,
        _count(of_completion.get("reasoning_tokens")) if isinstance(of_completion, dict) else None,
    )


class Usage:
    """One unit's."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_details: dict[str, Any] | None = None
    """The prefiller's `prompt_tokens_details`; None when it does not tell."""
    cached_tokens: int | None = None
    """Prompt tokens that were found in the prefix cache; None when that is not known."""
    counts_reasoning: bool | None = None
    """Whether the prefiller counts reasoning tokens, so a decoder does so in a chat. None: it sent no usage."""
    is_resumed: bool = False
    """The attempt under way goes on with an answer that another one began: what engines tell of the prompt is not about
    the client's."""

    def saw_prompt(self, usage: Any) -> Told:
        """Take what a usage object, whatever it really is, says of the prompt; see told_of_prompt for what is returned.

        The first to tell is right: later attempts find in the cache what the first ones put there.
        """
        told = tokens, cached = told_of_prompt(usage)
        if self.prompt_details is None and not self.is_resumed and isinstance(usage, dict):
            if tokens is not None:
                self.prompt_tokens = tokens
            details = usage.get("prompt_tokens_details")
            self.prompt_details = details if isinstance(details, dict) else None
            self.cached_tokens = cached
            self.counts_reasoning = usage.get("completion_tokens_details") is not None
        return told

    def saw_completion(self, usage: Any) -> None:
        """Take what a usage object, whatever it really is, says of the answer."""
        if isinstance(usage, dict) and (tokens := _count(usage.get("completion_tokens"))) is not None:
            self.completion_tokens = tokens


def told_of_prompt(usage: Any) -> Told:
    """The tokens of a prompt, and those of them that were in the prefix cache, as a usage object, whatever it really
    is, tells of one leg; None: it does not tell.
    """
    if not isinstance(usage, dict):
        return None, None
    details = usage.get("prompt_tokens_details")
    cached = details.get("cached_tokens") if isinstance(details, dict) else None
    return _count(usage.get("prompt_tokens")), _count(cached)


def _count(told: object) -> int | None:
    """A number of tokens, which a bool is not; None: it is none."""
    return told if type(told) is int and 0 <= told < _TOO_MANY else None
