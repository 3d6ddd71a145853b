"""How engines tell an answer and take it up again: the port behind which vLLM and SGLang differ. No IO."""

from __future__ import annotations

from abc import ABC, abstractmethod
from enum import Enum, auto
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from proxy.balancer.engines.capabilities import Capability
    from proxy.call import Call

    Has = Callable[[Capability], bool]
    """Whether all engines have it that may work on an answer."""


class Watch(Enum):
    """How closely an answer is watched while it is told, and so how it could go on."""

    __hash__ = object.__hash__  # that of an Enum is written in Python, and every request looks one up

    NOT = auto()  # it begins anew as long as the client has nothing of it
    TEXT = auto()  # it is asked for again, and compared with what the client has
    IDS = auto()  # it goes on from its token ids


class Watching:
    """How one answer is watched, and on whose engines."""

    __slots__ = ("engine", "is_close", "watch")

    def __init__(self, engine: Engine, watch: Watch) -> None:
        self.engine = engine
        self.watch = watch
        self.is_close = watch is not Watch.NOT
        """Whether it is watched at all."""

    def observed(self, call: Call) -> Call:
        """The call as it is sent to engines."""
        return self.engine.observed(call, self.watch) if self.is_close else call


class Engine(ABC):
    """One engine software. The defaults are vLLM's."""

    stop_member: ClassVar[str] = "stop_reason"
    """What a choice says of what stopped it: the stop string, or a token id."""
    shows_stop_member: ClassVar[str] = "include_stop_str_in_output"
    """The member of a request by which the stop string is a part of the answer."""
    names_stop_always: ClassVar[bool] = False
    """Every chunk has `stop_member`, and not only the last one."""
    tells_offsets: ClassVar[bool] = True
    """The log probabilities of a completion say where in the text each token begins."""
    reasoning_field: ClassVar[str] = "reasoning"
    """The member of a chat's delta that holds reasoning, unless an answer shows another one."""
    wants_text: ClassVar[bool] = False
    """A chat that goes on from token ids is told the text of its answer so far."""
    shows_half_tokens: ClassVar[bool] = False
    """Text is shown of a token although it ends in a character that is not complete."""

    def __init__(self) -> None:
        self.watching = {watch: Watching(self, watch) for watch in Watch}
        """Made once, as every request takes one."""

    # Watching

    @abstractmethod
    def watch(self, call: Call, has: Has) -> Watch:
        """How an answer can be watched without becoming another one."""

    @abstractmethod
    def observed(self, call: Call, watch: Watch) -> Call:
        """The call as it is sent so that its answer can be watched like this: streamed, with all that is generated."""

    # Going on

    @abstractmethod
    def is_reproducible(self, call: Call, *, seeds_repeat: bool) -> bool:
        """Whether the same request gives the same answer. Whether it did is compared."""

    @abstractmethod
    def is_structured(self, call: Call) -> bool:
        """Whether the answer is bound to a grammar, which would begin anew."""

    def inexact(self, call: Call) -> str | None:
        """Why the answer would be another one if a part of it became prompt; None: it would not."""
        return None

    @abstractmethod
    def next_seed(self, seed: int, segment: int) -> int:
        """The seed of the rest of an answer on which `segment` decoders have worked."""

    @abstractmethod
    def chat_from_ids(self, call: Call, key: str, prompt_ids: bytes, so_far: str) -> Call:
        """A chat whose prompt is these ids, a JSON array, which end in those of the answer `so_far`, text with markers.
        `key`: what engines of vLLM call them.
        """

    def as_completion(self, call: Call, sampling: Mapping[str, float] | None) -> Mapping[str, object]:
        """What becomes of a chat's sampling options in a completion. `sampling`: what chats are sampled by that do not
        say so themselves; None: it is not known. Raises CannotResume.
        """
        return {}

    # Words

    def shows_stops(self, call: Call) -> bool:
        """Whether a stop string is a part of the answer."""
        return bool(call.sampling.get(self.shows_stop_member))

    def whole_choice(self, text: Mapping[str, Any], ending: Mapping[str, Any], prompt_ids: Any) -> dict[str, Any]:
        """The only choice of a completion that is not streamed, in the engine's order. `ending` has its log
        probabilities, its finish and its token ids.
        """
        return {"index": 0, **text, **ending, "prompt_logprobs": None, "prompt_token_ids": prompt_ids}

    def whole_tail(self, fingerprint: str | None, usage: Mapping[str, Any] | None) -> dict[str, Any]:
        """What follows the choices of an answer that is not streamed."""
        return {"service_tier": None, "system_fingerprint": fingerprint, "usage": usage}
