"""PEP 517 backend: setuptools, which also compiles the package if PDPROXY_COMPILE is set.

    python -m build                      # an sdist, and a wheel that runs everywhere
    PDPROXY_COMPILE=1 python -m build    # an sdist, and a compiled wheel for this Python and platform

Packages that only the compiled build needs are required only with PDPROXY_COMPILE. Importing this module needs nothing
but setuptools.
"""

from __future__ import annotations

import os
import shutil
import sysconfig
import tomllib
from pathlib import Path
from typing import Any, Final

from setuptools import Extension, build_meta
from setuptools.build_meta import (
    build_editable,
    build_sdist,
    get_requires_for_build_editable,
    get_requires_for_build_sdist,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)
from setuptools.command.build_ext import build_ext

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]

_ROOT: Final = Path(__file__).parents[4]
_SUFFIX: Final = str(sysconfig.get_config_var("EXT_SUFFIX"))


def is_set(variable: str, *, default: bool = False) -> bool:
    """Return whether an environment variable asks for something. Raises SystemExit if the value is neither 0 nor 1."""
    value = os.environ.get(variable, "")
    if value not in ("", "0", "1"):
        raise SystemExit(f"{variable} is {value!r}; use 1 or 0")
    return value == "1" if value else default


def get_requires_for_build_wheel(config_settings: Any = None) -> list[str]:
    """Return the packages that building the wheel needs.

    mypyc reads the types of all packages that the gateway imports, and training runs the gateway.
    """
    needed: list[str] = build_meta.get_requires_for_build_wheel(config_settings)
    if is_set("PDPROXY_COMPILE"):
        file = tomllib.loads((_ROOT / "pyproject.toml").read_text())
        extras = file["project"]["optional-dependencies"]
        needed += file["dependency-groups"]["compile"] + file["project"]["dependencies"]
        needed += [package for name, packages in extras.items() if name != "dev" for package in packages]
    return needed


def build_wheel(wheel_directory: str, config_settings: Any = None, metadata_directory: str | None = None) -> str:
    """Build the wheel, without files that an earlier build left, which setuptools would pack."""
    for left in (*_ROOT.glob("build/lib*"), *_ROOT.glob("build/bdist.*")):
        shutil.rmtree(left)
    return str(build_meta.build_wheel(wheel_directory, config_settings, metadata_directory))


def setup_options() -> dict[str, Any]:
    """Return what setup.py passes to setuptools. Nothing is compiled before setuptools builds extension modules."""
    if not is_set("PDPROXY_COMPILE"):
        return {}
    # Any extension module makes setuptools name the wheel after this Python and platform.
    return {"ext_modules": [Extension("proxy", [])], "cmdclass": {"build_ext": _Compile}}


class _Compile(build_ext):
    """Builds the extension modules all at once, because mypyc compiles them as one."""

    def run(self) -> None:
        if self.editable_mode:
            raise SystemExit("PDPROXY_COMPILE: an editable installation cannot be compiled; unset the variable")
        from lab.common.compiled.build import NotCompiled, compiled

        try:
            self.directory = compiled(is_trained=is_set("PDPROXY_TRAIN", default=True))
        except NotCompiled as error:
            raise SystemExit(f"{error}\nPDPROXY_COMPILE: the build failed; see above.") from None
        self.extensions = extensions_in(self.directory)
        super().run()

    def build_extension(self, ext: Extension) -> None:
        target = Path(self.get_ext_fullpath(ext.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(self.directory / (ext.name.replace(".", "/") + _SUFFIX), target)


def extensions_in(directory: Path) -> list[Extension]:
    """Return the extension modules in a directory with a compiled package."""
    paths = [path.relative_to(directory) for path in (*directory.glob("*.so"), *directory.glob("proxy/**/*.so"))]
    return [Extension(str(path).removesuffix(_SUFFIX).replace("/", "."), []) for path in sorted(paths)]
