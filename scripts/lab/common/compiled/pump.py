"""Builds the extension module that passes tokens on; see `proxy/upstream/_pump.c`."""

from __future__ import annotations

import os
import subprocess
import sysconfig
from pathlib import Path
from typing import Final

SOURCE: Final = Path("proxy/upstream/_pump.c")
_FLAGS: Final = ("-O2", "-fPIC", "-shared", "-Wall", "-Wextra", "-Wno-unused-parameter", "-Wno-cast-function-type")


def build_pump(source: Path, directory: Path, *flags: str) -> Path:
    """Compile the module into a directory, and return its path. Raises CalledProcessError with the output."""
    target = directory / f"{source.stem}{sysconfig.get_config_var('EXT_SUFFIX')}"
    compiler = (os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc").split()
    include = f"-I{sysconfig.get_paths()['include']}"
    command = [*compiler, *_FLAGS, *flags, include, str(source), "-o", str(target)]
    subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return target
