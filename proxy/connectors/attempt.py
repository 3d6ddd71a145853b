"""One try at a call, as the taker of its answer sees it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol

from proxy.common.terms import Stage

if TYPE_CHECKING:
    from proxy.common.backend import Backend
    from proxy.dialects.engine_answer import PrefillAnswer
    from proxy.observe.timeline import Timeline
    from proxy.upstream import Response

_STREAM: Final = Stage.STREAM  # to read a member off its class takes as long as four calls


@dataclass(slots=True, eq=False)
class Attempt:
    """One try at a call: the decoder's open 200 answer, and the leases behind it."""

    response: Response
    timeline: Timeline
    prefiller: Backend | None
    """None: the connector has no prefill leg."""
    kv_handed_over: bool
    """The decoder got its KV cache from a prefiller, so its own details of the prompt are wrong."""
    handoff: Handoff
    first_token_seconds: float | None = None
    """Until the decoder's first output: more than timeouts.first_token_seconds, which None means, where the prefill is
    still under way."""
    prefill_answer: PrefillAnswer | None = None
    """The prefiller's answer; None if the client needs nothing of it, or if the prefiller is the only engine."""

    @property
    def prompt_tokens(self) -> int | None:
        """How many tokens the prompt has; None until an engine reports it."""
        return self.timeline.usage.prompt_tokens

    @property
    def prompt_details(self) -> dict[str, Any] | None:
        """Details of the prompt's tokens that engines report and that are true; None: there are none."""
        return self.timeline.usage.prompt_details

    def saw_usage(self, usage: Any) -> None:
        """Take in the `usage` of the decoder's answer. Its figures of the prompt are only believed where the decoder
        computed the prompt itself: handed-over KV cache counts as cached there.
        """
        self.timeline.usage.saw_completion(usage)
        if not self.kv_handed_over:
            self.timeline.usage.saw_prompt(usage)

    def kv_arrived(self) -> None:
        """The decoder has the KV cache: it sent its first output, so the prefiller holds nothing for it any more.

        Another reader that goes on with the stream may call this again.
        """
        self.handoff.arrived()
        stages = self.timeline.stages
        if not stages or stages[-1] is not _STREAM:
            self.timeline.enter(_STREAM)

    def kv_lost(self) -> None:
        """The decoder gave up before its first output: it has asked for the KV cache, and perhaps did not get it."""
        self.handoff.lost()
        self.timeline.enter(_STREAM)


class Handoff(Protocol):
    """Handles the end of the handoff of an attempt's KV cache."""

    def arrived(self) -> None:
        """See Attempt.kv_arrived. May be called again."""

    def lost(self) -> None:
        """See Attempt.kv_lost. May be called again."""
