"""The Python environment of the peers, apart from the gateway's: .venv-bench, made when it is first needed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from lab.common.processes import clean_environment

_DIRECTORY = Path(".venv-bench")
PYTHON = _DIRECTORY / "bin" / "python"
_LIST = """
import importlib.metadata, json
found = importlib.metadata.distributions()
print(json.dumps({d.metadata["Name"].lower().replace("_", "-"): d.version for d in found}))
"""


def provide(packages: tuple[str, ...]) -> bool:
    """Have wheels of these packages: `name`, `name==version` or `name<version`. False when there are none for us."""
    if not _installed():
        _run(sys.executable, "-m", "venv", "--clear", str(_DIRECTORY))
        (_DIRECTORY / ".gitignore").write_text("*\n")
    missing = [package for package in packages if not _has(package)]
    if not missing:
        return True
    print(f"installing {', '.join(missing)} in {_DIRECTORY} (once)", file=sys.stderr, flush=True)
    # A router built from source would be another program, if it could be built at all.
    pip = (
        str(PYTHON),
        "-m",
        "pip",
        "install",
        "--quiet",
        "--quiet",
        "--disable-pip-version-check",
        "--only-binary",
        ":all:",
    )
    return _run(*pip, *missing)


def _has(package: str) -> bool:
    name, _, version = package.partition("==")
    found = _installed().get(name.partition("<")[0])
    return found is not None and version in ("", found)


def _installed() -> dict[str, str]:
    """Version by name; empty when the environment does not work or is not there."""
    try:
        done = subprocess.run((str(PYTHON), "-c", _LIST), capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return {}
    return dict(json.loads(done.stdout))


def _run(*command: str) -> bool:
    # A virtual environment is no place for a user, target or prefix install, which a machine may have as pip's default.
    environment = clean_environment() | {"PIP_USER": "0"}
    for name in ("PIP_TARGET", "PIP_PREFIX", "PIP_ROOT", "PYTHONPATH"):
        environment.pop(name, None)
    done = subprocess.run(command, env=environment, stdout=sys.stderr, check=False)
    return done.returncode == 0
