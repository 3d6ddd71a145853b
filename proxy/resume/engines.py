"""The engine software that answers can be continued on, by its name. A new one is a file and a line here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from proxy.resume.sglang import SGLANG
from proxy.resume.vllm import VLLM

if TYPE_CHECKING:
    from collections.abc import Mapping

    from proxy.resume.engine import Engine

ENGINES: Final[Mapping[str, Engine]] = {"vLLM": VLLM, "SGLang": SGLANG}
"""By `Identity.kind`."""
