"""What was compiled is installed as it is."""

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
    """One that looks as if scripts/compile had made it."""
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


def test_a_wheel_has_what_was_compiled(directory: Path) -> None:
    done = wheel_of(directory)
    assert done.returncode == 0, done.stderr
    (wheel,) = (directory / "dist").iterdir()
    assert not wheel.stem.endswith("-any")
    with zipfile.ZipFile(wheel) as packed:
        for name in ("proxy/some.py", f"proxy/some{SUFFIX}", f"all{SUFFIX}"):
            assert packed.read(name).decode() == name


def test_what_was_compiled_for_another_python_is_not_installed(directory: Path) -> None:
    (directory / f"all{SUFFIX}").rename(directory / "all.cpython-27-other.so")
    done = wheel_of(directory)
    assert done.returncode == 1
    assert "compiled for another Python" in done.stderr
