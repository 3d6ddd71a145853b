"""The package once more, with its modules for requests compiled by mypyc: twice, as the compiler has to know which of
their ways are taken. A tenth of a request's CPU time is that.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Final

from lab.common.compiled.classes import Refused, compilable, subclassed, with_subclasses
from lab.common.compiled.modules import MODULES
from lab.common.compiled.training import train

COMPILED: Final = Path("build/compiled")
_STAMP: Final = "compiled-from"
_ROOT: Final = Path.cwd()  # the project's, see scripts/lib.sh
_HERE: Final = Path(__file__).parent
_FOR_PIP: Final = (_ROOT / "pyproject.toml", _ROOT / "README.md", _ROOT / "LICENSE", _HERE / "setup.py")
# Classes that somebody may well write another one of, beside those of which the package has some that are not compiled.
_PORTS: Final = {
    "ChatCompletions",
    "Client",
    "CommonAbilities",
    "Connector",
    "Dialect",
    "Engine",
    "FastForward",
    "OpenAi",
    "Policy",
    "RequestListener",
    "Segment",
    "Tracker",
}
# What was not counted is compiled as if nothing had been: no way of the gateway's is one to be slow on.
_COUNTING: Final = "-fprofile-generate -fprofile-update=prefer-atomic"
_COUNTED: Final = "-fprofile-use -fprofile-partial-training -Wno-missing-profile"


class NotCompiled(Exception):
    """With why: what the compiler has said, or what is in the way."""


def compiled(directory: Path = COMPILED) -> Path:
    """A directory that has the whole package, compiled for the Python that runs this, and that pip can install: made if
    there is none, or not of these sources. Raises NotCompiled, also rather than delete what somebody else has there.
    """
    stamp, made_from = _stamp(), directory / _STAMP
    is_ours = made_from.is_file()
    if not is_ours and directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise NotCompiled(f"{directory} is not empty, and was not made by this: name another directory")
    if not is_ours or made_from.read_text() != stamp:
        if is_ours:
            shutil.rmtree(directory)
        directory.mkdir(parents=True, exist_ok=True)
        made_from.write_text("")  # so that it is known again if this ends early
        _compile(directory)
        made_from.write_text(stamp)
    for needed in _FOR_PIP:
        shutil.copy(needed, directory)
    return directory


def _compile(directory: Path) -> None:
    shutil.copytree(_ROOT / "proxy", directory / "proxy", ignore=shutil.ignore_patterns("__pycache__"))
    _rewrite(directory)
    is_gcc = _is_gcc()
    _run("-m", "mypyc", *MODULES, cwd=directory, flags=_COUNTING if is_gcc else "")
    if is_gcc:
        train(directory)
        _run("build/setup.py", "build_ext", "--inplace", "--force", cwd=directory, flags=_COUNTED)
    shutil.rmtree(directory / "build")
    for path in MODULES:
        shutil.copy(_ROOT / path, directory / path)
    _run("-c", "import sys; sys.path.insert(0, ''); import proxy.process.worker.assembly", cwd=directory)


def _is_gcc() -> bool:
    """Whether that is the compiler. Others count in other ways, and compile once."""
    compiler = (sysconfig.get_config_var("CC") or "cc").split()
    told = subprocess.run([*compiler, "--version"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
    return b"Free Software Foundation" in told.stdout


def _run(*words: str, cwd: Path, flags: str = "") -> None:
    """A program of Python's. `flags`: for the C compiler. Raises NotCompiled if it fails."""
    command = [sys.executable, *words]
    under = {**os.environ, "CFLAGS": f"{os.environ.get('CFLAGS', '')} {flags}".strip()}
    done = subprocess.run(
        command, cwd=cwd, env=under, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    if done.returncode:
        raise NotCompiled(done.stdout)


def _rewrite(directory: Path) -> None:
    others = {str(path.relative_to(directory)): path for path in directory.rglob("*.py")}
    for path in MODULES:
        del others[path]
    names = _PORTS.union(*(subclassed(path.read_text()) for path in others.values()))
    names = with_subclasses(names, [(directory / path).read_text() for path in MODULES])
    for path in MODULES:
        source = directory / path
        try:
            source.write_text(compilable(source.read_text(), names))
        except Refused as error:
            raise NotCompiled(f"{path}: {error}") from None


def _stamp() -> str:
    """What a compiled package is made of."""
    made = hashlib.sha256(f"{sys.version} {importlib.metadata.version('mypy')} {MODULES}".encode())
    for path in sorted([*_ROOT.glob("proxy/**/*.py"), *_HERE.glob("*.py")]):
        made.update(f"{path.name}\n".encode() + path.read_bytes())
    return made.hexdigest()
