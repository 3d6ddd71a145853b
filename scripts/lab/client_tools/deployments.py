"""Simulated engines, and the gateway in front of them, as processes."""

from __future__ import annotations

import sys
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from lab.common.processes import HOST, free_ports, running, wait_until_ready

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

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
    def started(self, logs: Path) -> Iterator[int]:
        """All of them; yields the gateway's port."""
        gateway, *ports = free_ports(7)
        command = [sys.executable, "-m", "proxy", "--port", str(gateway), "--connector", self.connector]
        with ExitStack() as stack:
            for port, bootstrap_port in zip(ports[:2], ports[2:4], strict=True):
                behind = [str(bootstrap_port)] if self.has_bootstrap_ports else []
                self._start(stack, logs, "prefill", port, *(["--bootstrap-port", *behind] if behind else []))
                command += ["--prefill", f"http://{HOST}:{port}", *behind]
            for port in ports[4:]:
                self._start(stack, logs, "decode", port)
                command += ["--decode", f"http://{HOST}:{port}"]
            stack.enter_context(
                running("the gateway", command, gateway, logs / f"{self.connector}.log", self.environment)
            )
            wait_until_ready("the gateway", gateway, "/readyz")
            yield gateway

    def _start(self, stack: ExitStack, logs: Path, role: str, port: int, *more: str) -> None:
        command = [sys.executable, "-m", "proxy", "mock-engine", "--role", role, "--port", str(port), "--model", MODEL]
        name = f"engine {port}"
        stack.enter_context(running(name, [*command, *_SPEED, *self.flags, *more], port, logs / f"{port}.log"))


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
