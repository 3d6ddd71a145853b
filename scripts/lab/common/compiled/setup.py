"""The setup.py of a compiled build: packs existing extension modules into a wheel.

scripts/compile copies it into the build. It imports nothing of `lab`.
"""

from __future__ import annotations

import shutil
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

_HERE: Final = Path(__file__).parent
_SUFFIX: Final = sysconfig.get_config_var("EXT_SUFFIX")


class _Made(build_ext):
    def build_extension(self, ext: Extension) -> None:
        target = Path(self.get_ext_fullpath(ext.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(_HERE / (ext.name.replace(".", "/") + _SUFFIX), target)


def _made() -> Sequence[Extension]:
    paths = [path.relative_to(_HERE) for path in (*_HERE.glob("*.so"), *_HERE.glob("proxy/**/*.so"))]
    if not all(path.name.endswith(_SUFFIX) for path in paths):
        sys.exit(f"This was compiled for another Python than {sys.executable}, whose modules end in {_SUFFIX}.")
    return [Extension(str(path).removesuffix(_SUFFIX).replace("/", "."), []) for path in paths]


if __name__ == "__main__":
    setup(ext_modules=_made(), cmdclass={"build_ext": _Made})
