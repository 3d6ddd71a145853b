"""Build the package with its modules for requests compiled by mypyc, twice.

The first build counts which branches run. Branch counts save a tenth of a request's CPU time.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import select
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from lab.common.compiled.classes import Refused, compilable, subclassed, with_subclasses
from lab.common.compiled.modules import MODULES
from lab.common.compiled.pump import SOURCE, build_pump

_ROOT: Final = Path.cwd()  # the project's, see scripts/lib.sh
COMPILED: Final = Path("build/compiled", sys.implementation.cache_tag)
"""Directory of the compiled package for this Python, relative to the project's."""
_STAMP: Final = "compiled-from"
_HERE: Final = Path(__file__).parent
# Classes that other code may subclass, in addition to those with interpreted subclasses in the package.
PORTS: Final = {
    "ChatCompletions",
    "CommonAbilities",
    "Connector",
    "Dialect",
    "Engine",
    "EngineRoom",
    "FastForward",
    "LeaseTracker",
    "OpenAi",
    "Policy",
    "RequestListener",
    "Segment",
}
# Nothing outside the one extension module calls its functions. Without these flags each call between them goes through
# a table and cannot be inlined, which costs 4 % of a request's CPU time.
_DIRECT_CALLS: Final = "-fvisibility=hidden -fno-semantic-interposition"
# Code without counts is compiled as usual, so no path of the gateway becomes slower.
_COUNTING: Final = "-fprofile-generate -fprofile-update=prefer-atomic"
_COUNTED: Final = "-fprofile-use -fprofile-partial-training -Wno-missing-profile"


class NotCompiled(Exception):
    """The build failed. The text is the compiler's output, or the obstacle."""


def compiled(*, is_trained: bool = True) -> Path:
    """Return a directory with the compiled package, which is built if it is missing or was built from other sources.

    Raises NotCompiled.
    Args:
      is_trained: Whether GCC compiles twice. Once takes half of the time, and a request then takes a tenth more.
    """
    is_trained = _is_gcc() and is_trained
    stamp, made_from = _stamp(is_trained), COMPILED / _STAMP
    if not made_from.is_file() or made_from.read_text() != stamp:
        shutil.rmtree(COMPILED, ignore_errors=True)
        COMPILED.mkdir(parents=True)
        _compile(COMPILED, is_trained)
        made_from.write_text(stamp)
    return COMPILED


def _compile(directory: Path, is_trained: bool) -> None:
    shutil.copytree(_ROOT / "proxy", directory / "proxy", ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    for path, source in rewritten(directory):
        (directory / path).write_text(source)
    _run("-m", "mypyc", *MODULES, cwd=directory, flags=_COUNTING if is_trained else "")
    if is_trained:
        _run("-m", "lab.common.compiled.training", str(directory), cwd=_ROOT)
        _run("build/setup.py", "build_ext", "--inplace", "--force", cwd=directory, flags=_COUNTED)
    shutil.rmtree(directory / "build")
    _build_pump(directory)
    for path in MODULES:
        shutil.copy(_ROOT / path, directory / path)
    _run("-c", "import sys; sys.path.insert(0, ''); import proxy.process.worker.assembly", cwd=directory)


def _build_pump(directory: Path) -> None:
    """Build the extension module that passes tokens on, if the system has epoll."""
    if hasattr(select, "epoll"):
        try:
            build_pump(directory / SOURCE, (directory / SOURCE).parent)
        except subprocess.CalledProcessError as error:
            raise NotCompiled(error.stdout) from None


def _is_gcc() -> bool:
    """Return whether the C compiler is GCC. Others count in other ways, and compile once.

    Raises NotCompiled if there is no C compiler.
    """
    compiler = (sysconfig.get_config_var("CC") or "cc").split()
    command = [*compiler, "--version"]
    try:
        version = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
    except FileNotFoundError:
        raise NotCompiled(f"there is no C compiler {compiler[0]}: install it, or build the interpreted wheel") from None
    return b"Free Software Foundation" in version.stdout


def _run(*words: str, cwd: Path, flags: str = "") -> None:
    """Run Python with these words. `flags`: for the C compiler. Raises NotCompiled if it fails."""
    command = [sys.executable, *words]
    cflags = f"{os.environ.get('CFLAGS', '')} {_DIRECT_CALLS} {flags}".strip()
    # `lab` is found by training, and pip's packages for the build by all.
    paths = os.pathsep.join(filter(None, [str(_HERE.parents[2]), os.environ.get("PYTHONPATH")]))
    under = {**os.environ, "CFLAGS": cflags, "PYTHONPATH": paths}
    done = subprocess.run(
        command, cwd=cwd, env=under, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    if done.returncode:
        raise NotCompiled(done.stdout)


def rewritten(root: Path) -> Iterator[tuple[str, str]]:
    """Yield the path of each compiled module, and the source that mypyc reads for it.

    `root`: directory of the package. Raises NotCompiled.
    """
    sources = {str(path.relative_to(root)): path.read_text() for path in root.glob("proxy/**/*.py")}
    names = PORTS.union(*(subclassed(source) for path, source in sources.items() if path not in MODULES))
    names = with_subclasses(names, [sources[path] for path in MODULES])
    for path in MODULES:
        try:
            yield path, compilable(sources[path], names)
        except Refused as error:
            raise NotCompiled(f"{path}: {error}") from None


def _stamp(is_trained: bool) -> str:
    """Return a hash of everything that a compiled package is built from."""
    made = hashlib.sha256(f"{sys.version} {importlib.metadata.version('mypy')} {is_trained} {MODULES}".encode())
    package = [path for path in _ROOT.glob("proxy/**/*.*") if path.is_file() and path.suffix not in (".pyc", ".so")]
    for path in sorted([*package, *_HERE.glob("*.py")]):
        made.update(f"{path.name}\n".encode() + path.read_bytes())
    return made.hexdigest()
