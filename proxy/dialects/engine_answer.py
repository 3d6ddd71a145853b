"""What an engine's answer offers to those who read it, and do not care who got it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping

    from proxy.common.errors import Failure, UpstreamError


class EngineAnswer(Protocol):
    """It makes the error for itself when it cannot be used; `upstream.Response` is one."""

    def fail(self, failure: Failure, message: str) -> UpstreamError:
        """The error for an answer that arrived but cannot be used."""

    def unreadable(self, message: str) -> UpstreamError:
        """The error for an answer that was complete, and has members that cannot be read; see UpstreamError."""

    def refuse(self, message: str, status: int, body: bytes | None, headers: Mapping[str, str]) -> UpstreamError:
        """The error for an engine's own refusal, which reaches the client in its own words."""


class PrefillAnswer(Protocol):
    """A prefiller's answer, which may come later than the decoder's first words."""

    @property
    def so_far(self) -> bytes | None:
        """The whole body; None until it has come."""

    async def whole(self) -> bytes:
        """Wait for it. Raises UpstreamError."""


class AnsweredAttempt(Protocol):
    """What is known of one try at a call beside the decoder's answer; `connectors.base.Attempt` is one."""

    @property
    def kv_handed_over(self) -> bool:
        """The decoder got its KV cache from a prefiller, so its own details of the prompt are wrong."""

    @property
    def prompt_tokens(self) -> int | None:
        """How many tokens the prompt has, as far as an engine has told; None while none has."""

    @property
    def prompt_details(self) -> dict[str, Any] | None:
        """The engine's `prompt_tokens_details` that are true; None if no engine has told."""

    @property
    def prefill_answer(self) -> PrefillAnswer | None:
        """None where the prefiller adds nothing to what the decoder tells, or is the only engine."""
