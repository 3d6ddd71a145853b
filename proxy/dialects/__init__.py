"""The APIs that clients speak: one file for each dialect, and the table of all dialects."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from proxy.dialects.messages import Messages
from proxy.dialects.openai import ChatCompletions, Completions
from proxy.dialects.responses import Responses
from proxy.dialects.sglang_generate import SglangGenerate

if TYPE_CHECKING:
    from collections.abc import Sequence

    from proxy.dialects.base import Dialect

DIALECTS: Final[Sequence[Dialect]] = (ChatCompletions(), Completions(), Messages(), Responses(), SglangGenerate())
"""All dialects. A dialect is served if the connector's engines serve its API (`Dialect.api`)."""
