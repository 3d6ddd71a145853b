"""Clients' libraries and programs out of PyPI and npm, in .venv-clients, and what the libraries do with the gateway.

Each program in programs/ uses one library, and is silent about nothing.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Final

from lab.common.peers import Environment, run
from lab.common.processes import finished

_ENVIRONMENT: Final = Environment(".venv-clients")
NODE: Final = _ENVIRONMENT.directory / "node"
_WHEELS: Final = (
    *("anthropic==2.12.0", "openai==3.54.0", "openai-agents==0.24.0", "litellm==1.83.0"),
    "langchain-anthropic==1.7.7",
)
_PACKAGES: Final = (
    *("@anthropic-ai/sdk@1.12.0", "openai@6.49.0", "ai@6.0.326", "@ai-sdk/anthropic@3.0.139", "@ai-sdk/openai@3.0.141"),
    *("@anthropic-ai/claude-code@2.1.332", "@openai/codex@0.171.0", "opencode-ai@1.18.33"),
)
_PROGRAMS: Final = Path(__file__).with_name("programs")
_HELPERS: Final = ("__init__", "part")
_PATIENCE_SECONDS: Final = 120.0


def provide() -> bool:
    """Have them. False when they cannot be had; then pip or npm has said why."""
    if not _ENVIRONMENT.provide(_WHEELS):
        return False
    installed, wanted = NODE / "packages.txt", "\n".join(_PACKAGES)
    if installed.exists() and installed.read_text() == wanted:
        return True
    NODE.mkdir(exist_ok=True)
    npm = ("npm", "install", "--prefix", str(NODE), "--no-audit", "--no-fund", "--loglevel", "error")
    if is_well := run(*npm, *_PACKAGES):
        installed.write_text(wanted)
    return is_well


def names() -> list[str]:
    """Of the programs."""
    files = sorted(_PROGRAMS.glob("*.py")) + sorted(_PROGRAMS.glob("*.mjs"))
    return [file.name for file in files if file.stem not in _HELPERS]


def ran(name: str, port: int) -> tuple[bool, str]:
    """One of them against the gateway on this port: whether it went well, and what it said last."""
    if name.endswith(".mjs"):
        for file in _PROGRAMS.glob("*.mjs"):
            shutil.copy(file, NODE)  # modules look for packages where they are
        command = ["node", str(NODE / name)]
    else:
        command = [
            str(_ENVIRONMENT.python),
            "-W",
            "ignore",
            "-m",
            f"lab.client_tools.programs.{name.removesuffix('.py')}",
        ]
    done = finished([*command, str(port)], _PATIENCE_SECONDS)
    said = done.stdout.strip().splitlines() or ["nothing"]
    return done.returncode == 0, said[-1] if done.returncode == 0 else "\n".join(said[-12:])
