"""Simulated engines, and the gateway in front of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from lab.common.fleet import Fleet, Gateway

MODEL = "served"
_SPEED = ("--prefill-ms-per-1k-tokens", "50", "--decode-step-ms", "5")


@dataclass(frozen=True, slots=True)
class Deployment:
    """Two prefillers and two decoders of one kind. `flags`: of each engine; `connector`: of the gateway."""

    name: str
    flags: tuple[str, ...]
    connector: str
    has_bootstrap_ports: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)
    """Of the gateway."""

    @contextmanager
    def started(self) -> Iterator[Gateway]:
        """Run all of them."""
        with Fleet() as fleet:
            for role in ("prefill", "prefill", "decode", "decode"):
                has_bootstrap_port = self.has_bootstrap_ports and role == "prefill"
                fleet.mock_engine(role, "--model", MODEL, *_SPEED, *self.flags, bootstrap=has_bootstrap_port)
            yield fleet.keep(fleet.gateway("--connector", self.connector, environment=self.environment))


DEPLOYMENTS = (
    Deployment("vLLM", ("--profile", "v0.33"), "vllm_pull"),
    Deployment("SGLang", ("--profile", "sglang"), "sglang_bootstrap", has_bootstrap_ports=True),
)
TOOLS = Deployment(
    "vLLM",
    ("--profile", "v0.33", "--tool-call-parser", "kimi_k2", "--eos-after", "60", "--max-model-len", "1000000"),
    "vllm_pull",
    environment={"PROXY_MODELS__ALIASES": f"claude-*={MODEL},gpt-*={MODEL}"},
)
"""Engines that call tools, under the names that clients have by themselves."""
