"""PDPROXY_COMPILE decides which wheel the standard tools build, and what building it requires."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from pathlib import Path
from typing import Any, Final

import pytest

from lab.common.compiled.backend import get_requires_for_build_wheel, is_set
from lab.common.compiled.build import NotCompiled, compiled
from lab.common.compiled.modules import MODULES

ROOT: Final = Path(__file__).parents[4]
PYPROJECT: Final[dict[str, Any]] = tomllib.loads((ROOT / "pyproject.toml").read_text())
SUFFIX: Final = sysconfig.get_config_var("EXT_SUFFIX")
BUILT: Final = (f"proxy/some{SUFFIX}", f"all__mypyc{SUFFIX}")
# Stands for the compiler, which takes minutes.
COMPILER: Final = f"""
from pathlib import Path

class NotCompiled(Exception):
    pass

def compiled(is_trained):
    if Path("broken").exists():
        raise NotCompiled("some.c:1: error")
    for name in {BUILT}:
        path = Path("build/there", name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    return Path("build/there")
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """Return a small project with this backend."""
    for name in ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "CHANGELOG.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / "scripts/lab/common/compiled", tmp_path / "scripts/lab/common/compiled")
    for package in ("scripts/lab", "scripts/lab/common"):
        (tmp_path / package / "__init__.py").touch()
    (tmp_path / "scripts/lab/common/compiled/build.py").write_text(COMPILER)
    (tmp_path / "proxy").mkdir()
    shutil.copy(ROOT / "proxy/__init__.py", tmp_path / "proxy")
    (tmp_path / "proxy/some.py").write_text("")
    return tmp_path


def build(project: Path, hook: str) -> subprocess.CompletedProcess[str]:
    """Call a hook of the backend as pip does."""
    code = f"from lab.common.compiled import backend; print(backend.{hook}('dist'))"
    environment = {"PYTHONPATH": "scripts", "PATH": "/usr/bin:/bin", "PDPROXY_COMPILE": "1"}
    if hook.startswith("pure_"):
        del environment["PDPROXY_COMPILE"]
        code = code.replace("pure_", "")
    return subprocess.run(
        [sys.executable, "-c", code], cwd=project, env=environment, capture_output=True, text=True, check=False
    )


def names_in(project: Path) -> tuple[str, set[str]]:
    """Return the name of the only wheel, and the names of the files in it."""
    (wheel,) = (project / "dist").glob("*.whl")
    with zipfile.ZipFile(wheel) as packed:
        return wheel.stem, set(packed.namelist())


def test_wheel_is_pure_by_default(project: Path) -> None:
    done = build(project, "pure_build_wheel")
    assert done.returncode == 0, done.stderr
    name, files = names_in(project)
    assert name.endswith("-py3-none-any")
    assert "proxy/some.py" in files
    assert not files.intersection(BUILT)


def test_wheel_has_the_compiled_modules_and_their_source_when_asked(project: Path) -> None:
    done = build(project, "build_wheel")
    assert done.returncode == 0, done.stderr
    name, files = names_in(project)
    assert name.split("-")[2:4] == [f"cp{sys.version_info[0]}{sys.version_info[1]}"] * 2
    assert files.issuperset({"proxy/some.py", *BUILT})


def test_wheel_has_no_files_of_an_earlier_build(project: Path) -> None:
    assert build(project, "build_wheel").returncode == 0
    shutil.rmtree(project / "dist")
    (project / "proxy/some.py").rename(project / "proxy/other.py")
    assert build(project, "pure_build_wheel").returncode == 0
    _, files = names_in(project)
    assert {name for name in files if name.startswith("proxy/")} == {"proxy/__init__.py", "proxy/other.py"}


def test_failed_compilation_fails_the_build_with_the_output_of_the_compiler(project: Path) -> None:
    (project / "broken").touch()
    done = build(project, "build_wheel")
    assert done.returncode == 1
    assert "some.c:1: error\nPDPROXY_COMPILE: the build failed" in done.stderr
    assert not list(project.glob("dist/*.whl"))


def test_editable_installation_is_not_compiled(project: Path) -> None:
    done = build(project, "build_editable")
    assert done.returncode == 1
    assert "an editable installation cannot be compiled" in done.stderr


def test_sdist_can_build_a_compiled_wheel(project: Path) -> None:
    shutil.copytree(ROOT / "proxy/upstream", project / "proxy/upstream")
    assert build(project, "build_sdist").returncode == 0
    (sdist,) = (project / "dist").glob("*.tar.gz")
    (project / "unpacked").mkdir()
    # Python's own functions differ between 3.11.2, 3.12 and 3.14 in whether they take and want a filter.
    subprocess.run(["tar", "--extract", "--file", sdist, "--directory", project / "unpacked"], check=True)
    (unpacked,) = (project / "unpacked").iterdir()
    assert (unpacked / "proxy/upstream/_pump.c").is_file()
    done = build(unpacked, "build_wheel")
    assert done.returncode == 0, done.stderr
    assert names_in(unpacked)[1].issuperset(BUILT)


def test_only_the_compiled_wheel_requires_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PDPROXY_COMPILE", raising=False)
    assert get_requires_for_build_wheel() == []
    monkeypatch.setenv("PDPROXY_COMPILE", "1")
    needed = get_requires_for_build_wheel()
    assert set(needed).issuperset(PYPROJECT["project"]["dependencies"])
    assert set(needed).issuperset(PYPROJECT["dependency-groups"]["compile"])
    assert set(needed).issuperset(PYPROJECT["project"]["optional-dependencies"]["otel"])


@pytest.mark.parametrize(("value", "expected"), [("", True), ("0", False), ("1", True)])
def test_variable_of_the_build_is_0_or_1(monkeypatch: pytest.MonkeyPatch, value: str, expected: bool) -> None:
    monkeypatch.setenv("PDPROXY_TRAIN", value)
    assert is_set("PDPROXY_TRAIN", default=True) is expected
    monkeypatch.setenv("PDPROXY_TRAIN", "yes")
    with pytest.raises(SystemExit, match="PDPROXY_TRAIN is 'yes'; use 1 or 0"):
        is_set("PDPROXY_TRAIN")


def test_pythons_of_cibuildwheel_are_those_of_the_classifiers() -> None:
    built = {word[2:].removesuffix("-*") for word in PYPROJECT["tool"]["cibuildwheel"]["build"].split()}
    named = {line.rpartition(" ")[2] for line in PYPROJECT["project"]["classifiers"] if " :: Python :: 3." in line}
    assert built == {version.replace(".", "") for version in named}


def test_missing_compiler_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/missing")
    with pytest.raises(NotCompiled, match=r"there is no C compiler \S+: install it"):
        compiled()


def test_compiled_modules_exist() -> None:
    assert [path for path in MODULES if not (ROOT / path).is_file()] == []
