"""Runs one conversation with and without `listen.fast_path`, and compares the results."""

from __future__ import annotations

from difflib import unified_diff
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from proxy.gateway import fast_connection as connection
from proxy.listener.replies import choose_request_id
from tests.recorded.conversation import Conversation, Talk
from tests.recorded.course import course


class Roads:
    """Both of them; see `take`."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._store = cache(lambda: directory)
        self._fast = 0

        def counted(given: str) -> str:
            self._fast += 1
            return choose_request_id(given)

        monkeypatch.setattr(connection, "choose_request_id", counted)  # the first that is done when one has begun

    async def take(self, talk: Talk, *, is_fast: int | None = None, settings: dict[str, Any], **fields: Any) -> None:
        """Have a conversation on both roads, and compare the courses and the log.

        Args:
            talk: The actions of the clients.
            is_fast: The number of requests that begin on the fast path. None: any.
            settings: The settings of the gateway.
            fields: Other fields of a Conversation.
        """
        conversation = Conversation(name="both", talk=talk, settings=settings, **fields)
        fast = await course(conversation, True, self._store, tells_log=True)
        begun, self._fast = self._fast, 0
        other = await course(conversation, False, self._store, tells_log=True)
        assert self._fast == 0
        assert is_fast is None or begun == is_fast, f"{begun} requests began on the fast path, not {is_fast}"
        if differences := list(unified_diff(other.splitlines(), fast.splitlines(), lineterm="", n=0))[2:]:
            pytest.fail("on the fast path (+) it is not as on the other (-):\n" + "\n".join(differences), pytrace=False)
