"""Compiled modules are installed unchanged."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
import zipfile
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

SUFFIX = sysconfig.get_config_var("EXT_SUFFIX")


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Return a directory like one of scripts/compile."""
    for name in ("pyproject.toml", "README.md", "LICENSE", "scripts/lab/common/compiled/setup.py"):
        shutil.copy(name, tmp_path)
    (tmp_path / "proxy").mkdir()
    shutil.copy("proxy/__init__.py", tmp_path / "proxy")
    for name in ("proxy/some.py", f"proxy/some{SUFFIX}", f"all{SUFFIX}"):
        (tmp_path / name).write_text(name)
    return tmp_path


def wheel_of(directory: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "setup.py", "bdist_wheel", "--dist-dir", "dist"]
    return subprocess.run(command, cwd=directory, capture_output=True, text=True, check=False)


def test_wheel_has_the_compiled_modules(directory: Path) -> None:
    done = wheel_of(directory)
    assert done.returncode == 0, done.stderr
    (wheel,) = (directory / "dist").iterdir()
    assert not wheel.stem.endswith("-any")
    with zipfile.ZipFile(wheel) as packed:
        for name in ("proxy/some.py", f"proxy/some{SUFFIX}", f"all{SUFFIX}"):
            assert packed.read(name).decode() == name


def test_modules_for_another_python_are_not_installed(directory: Path) -> None:
    (directory / f"all{SUFFIX}").rename(directory / "all.cpython-27-other.so")
    done = wheel_of(directory)
    assert done.returncode == 1
    assert "compiled for another Python" in done.stderr
