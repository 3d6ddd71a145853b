"""Virtual environments for other programs, made when they are first needed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Final

from lab.common.processes import clean_environment

_LIST: Final = """
import importlib.metadata, json
found = importlib.metadata.distributions()
print(json.dumps({d.metadata["Name"].lower().replace("_", "-"): d.version for d in found}))
"""


class Environment:
    """One of them, in a directory of the project that git ignores."""

    def __init__(self, directory: str) -> None:
        self.directory = Path(directory).absolute()
        self.python = self.directory / "bin" / "python"

    def provide(self, packages: tuple[str, ...], *options: str) -> bool:
        """Install what is missing of these packages: `name`, `name==version` or `name<version`. False if pip cannot.

        Wheels only: a program built from source would be another one, if it could be built at all. `options`: pip's.
        """
        installed = self._installed()
        if not installed:
            run(sys.executable, "-m", "venv", "--clear", str(self.directory))
            (self.directory / ".gitignore").write_text("*\n")
        missing = [package for package in packages if not _is_in(installed, package)]
        if not missing:
            return True
        print(f"installing {', '.join(missing)} in {self.directory.name} (once)", file=sys.stderr, flush=True)
        pip = ("-m", "pip", "install", "--quiet", "--quiet", "--disable-pip-version-check", "--only-binary", ":all:")
        return run(str(self.python), *pip, *options, *missing)

    def has(self, package: str) -> bool:
        """Whether this package is installed."""
        return _is_in(self._installed(), package)

    def _installed(self) -> dict[str, str]:
        """Version by name; empty when the environment does not work or is not there."""
        try:
            done = subprocess.run((str(self.python), "-c", _LIST), capture_output=True, check=True)
        except (OSError, subprocess.CalledProcessError):
            return {}
        return dict(json.loads(done.stdout))


def _is_in(installed: dict[str, str], package: str) -> bool:
    name, _, version = package.partition("==")
    found = installed.get(name.partition("<")[0].partition("[")[0])
    return found is not None and version in ("", found)


def run(*command: str) -> bool:
    """Run an installer; whether it went well."""
    # A virtual environment is no place for a user, target or prefix install, which a machine may have as pip's default.
    environment = clean_environment() | {"PIP_USER": "0"}
    for name in ("PIP_TARGET", "PIP_PREFIX", "PIP_ROOT", "PYTHONPATH"):
        environment.pop(name, None)
    try:
        return subprocess.run(command, env=environment, stdout=sys.stderr, check=False).returncode == 0
    except FileNotFoundError:  # no npm
        return False


PEERS: Final = Environment(".venv-bench")
"""Environment of the peers that this gateway is compared with."""
