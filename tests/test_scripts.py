"""Help of all scripts: it is printed, and nothing else happens."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SCRIPTS = sorted(path.name for path in (ROOT / "scripts").iterdir() if path.is_file() and os.access(path, os.X_OK))
WITHOUT_ARGUMENTS = ("check", "demo", "slow-clients", "test-deployment", "test-dns")
# The programs that help needs. Others are not available in these tests.
NEEDED = "bash", "basename", "dirname", "env", "sed"


def run(
    script: str, *arguments: str, root: Path = ROOT, environ: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    command = [str(root / "scripts" / script), *arguments]
    return subprocess.run(command, env=environ, cwd="/", capture_output=True, text=True, check=False)


def head(script: str) -> str:
    """Return the text of a script's head comment."""
    lines = (ROOT / "scripts" / script).read_text().splitlines()[1:]
    return "".join(f"{line[2:]}\n" for line in lines[: next(i for i, line in enumerate(lines) if line[:1] != "#")])


@pytest.fixture
def fresh_clone(tmp_path: Path) -> Path:
    """Return a clone with the files that scripts read before they have a .venv."""
    shutil.copytree(ROOT / "scripts", tmp_path / "clone" / "scripts")
    shutil.copy(ROOT / "pyproject.toml", tmp_path / "clone")
    return tmp_path / "clone"


@pytest.mark.parametrize("flag", ["--help", "-h"])
@pytest.mark.parametrize("script", SCRIPTS)
def test_help_installs_nothing_in_a_fresh_clone(script: str, flag: str, fresh_clone: Path, tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    for program in NEEDED:
        found = shutil.which(program)
        assert found is not None
        (tmp_path / "bin" / program).symlink_to(found)
    before = sorted(fresh_clone.rglob("*"))
    result = run(script, flag, root=fresh_clone, environ={"PATH": str(tmp_path / "bin")})
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout == f"{head(script)}\n"
    assert sorted(fresh_clone.rglob("*")) == before


# With a .venv, programs print their options, too.
@pytest.mark.parametrize("script", sorted({*SCRIPTS} - {*WITHOUT_ARGUMENTS}))
def test_help_prints_options_with_a_venv(script: str) -> None:
    result = run(script, "--help")
    assert (result.returncode, result.stderr) == (0, "")
    comment, _, options = result.stdout.partition(f"{head(script)}\n")
    assert comment == ""
    assert options == "" or options.startswith("usage: ")


@pytest.mark.parametrize("script", WITHOUT_ARGUMENTS)
def test_script_without_arguments_rejects_them_first(script: str, fresh_clone: Path) -> None:
    result = run(script, "--frobnicate", root=fresh_clone)
    assert result.returncode == 2
    assert "takes no arguments, and got --frobnicate" in result.stderr
    assert not (fresh_clone / ".venv").exists()


def test_lab_programs_have_scripts_of_their_names() -> None:
    lab = ROOT / "scripts" / "lab"
    programs = {path.parent.name for path in lab.glob("*/__main__.py")}
    programs |= {path.stem for path in lab.glob("*.py") if path.stem != "__init__"}
    runs = {script for script in SCRIPTS if "run_lab" in (ROOT / "scripts" / script).read_text()}
    assert {script.replace("-", "_") for script in runs} == programs
