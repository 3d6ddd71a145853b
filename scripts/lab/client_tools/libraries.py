"""What clients' libraries do with the gateway: each program in programs/ does it, and is silent about nothing."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Final

from lab.client_tools import installed
from lab.common.processes import finished

_PROGRAMS: Final = Path(__file__).with_name("programs")
_HELPERS: Final = ("__init__", "part")
_PATIENCE_SECONDS: Final = 120.0


def names() -> list[str]:
    """Of the programs."""
    files = sorted(_PROGRAMS.glob("*.py")) + sorted(_PROGRAMS.glob("*.mjs"))
    return [file.name for file in files if file.stem not in _HELPERS]


def run(name: str, port: int) -> tuple[bool, str]:
    """One of them against the gateway on this port: whether it went well, and what it said last."""
    if name.endswith(".mjs"):
        for file in _PROGRAMS.glob("*.mjs"):
            shutil.copy(file, installed.NODE)  # modules look for packages where they are
        command = ["node", str(installed.NODE / name)]
    else:
        command = [str(installed.PYTHON), "-W", "ignore", "-m", f"lab.client_tools.programs.{name.removesuffix('.py')}"]
    done = finished([*command, str(port)], _PATIENCE_SECONDS)
    said = done.stdout.strip().splitlines() or ["nothing"]
    return done.returncode == 0, said[-1] if done.returncode == 0 else "\n".join(said[-12:])
