"""Clients' libraries and programs out of PyPI and npm, in .venv-clients, made when they are first needed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Final

from lab.common.processes import clean_environment

_DIRECTORY: Final = Path(".venv-clients").absolute()
PYTHON: Final = _DIRECTORY / "bin" / "python"
NODE: Final = _DIRECTORY / "node"

_WHEELS: Final = (
    *("anthropic==2.12.0", "openai==3.54.0", "openai-agents==0.24.0", "litellm==1.83.0"),
    "langchain-anthropic==1.7.7",
)
_PACKAGES: Final = (
    *("@anthropic-ai/sdk@1.12.0", "openai@6.49.0", "ai@6.0.326", "@ai-sdk/anthropic@3.0.139", "@ai-sdk/openai@3.0.141"),
    *("@anthropic-ai/claude-code@2.1.332", "@openai/codex@0.171.0", "opencode-ai@1.18.33"),
)


def provide() -> bool:
    """Have them. False when they cannot be had; then pip or npm has said why."""
    if not PYTHON.exists():
        _run(sys.executable, "-m", "venv", str(_DIRECTORY))
        (_DIRECTORY / ".gitignore").write_text("*\n")
    pip = (str(PYTHON), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--only-binary", ":all:")
    NODE.mkdir(exist_ok=True)
    npm = ("npm", "install", "--prefix", str(NODE), "--no-audit", "--no-fund", "--loglevel", "error")
    return _once("wheels", _WHEELS, *pip) and _once("packages", _PACKAGES, *npm)


def _once(what: str, names: tuple[str, ...], *command: str) -> bool:
    """Install them, unless it was these that were installed last."""
    told, wanted = _DIRECTORY / f"{what}.txt", "\n".join(names)
    if told.exists() and told.read_text() == wanted:
        return True
    print(f"installing {', '.join(names)} (once)", file=sys.stderr, flush=True)
    if not _run(*command, *names):
        return False
    told.write_text(wanted)
    return True


def _run(*command: str) -> bool:
    environment = clean_environment() | {"PIP_USER": "0"}
    environment.pop("PYTHONPATH")
    try:
        return subprocess.run(command, env=environment, stdout=sys.stderr, check=False).returncode == 0
    except FileNotFoundError:  # no npm
        return False
