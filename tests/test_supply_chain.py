"""Locked packages, bounds of versions, and files that hosts of repositories read."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parent.parent
PYPROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT: dict[str, Any] = PYPROJECT["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]
OF_USERS = [*PROJECT["dependencies"], *(line for name, lines in EXTRAS.items() if name != "dev" for line in lines)]
LOCKS = {
    "runtime": OF_USERS,
    "build": [*PYPROJECT["build-system"]["requires"], *PYPROJECT["dependency-groups"]["compile"]],
    "docs": PYPROJECT["dependency-groups"]["docs"],
    "proxies": PYPROJECT["dependency-groups"]["proxies"],
    "dev": [*PROJECT["dependencies"], *EXTRAS["dev"]],
}


def locked(name: str) -> dict[str, Version]:
    """Return the versions in a lock file by name."""
    text = (ROOT / "requirements" / f"{name}.txt").read_text()
    return {
        canonicalize_name(name): Version(version) for name, version in re.findall(r"^(\S+?)==(\S+)", text, re.MULTILINE)
    }


@pytest.mark.parametrize("line", OF_USERS)
def test_package_is_bounded_by_its_next_major_version(line: str) -> None:
    bounds = {one.operator: Version(one.version) for one in Requirement(line).specifier}
    assert bounds.keys() == {">=", "<"}
    lowest, bound = bounds[">="], bounds["<"]
    assert lowest < bound == Version(str(bound.major))


@pytest.mark.parametrize("name", LOCKS)
def test_lock_has_every_package_in_an_accepted_version(name: str) -> None:
    versions = locked(name)
    for line in LOCKS[name]:
        wanted = Requirement(line)
        found = versions.get(canonicalize_name(wanted.name))
        assert found is not None, f"{wanted.name} is not locked: run scripts/lock"
        assert found in wanted.specifier, f"{wanted.name} {found} is locked, and {line} is wanted: run scripts/lock"


@pytest.mark.parametrize("name", LOCKS)
def test_lock_has_hashes_of_every_package(name: str) -> None:
    text = (ROOT / "requirements" / f"{name}.txt").read_text()
    blocks = re.split(r"^(?=\S)", text, flags=re.MULTILINE)[1:]
    assert [block.partition(" ")[0] for block in blocks if "--hash=sha256:" not in block] == []


def test_locks_agree_on_common_packages() -> None:
    dev = locked("dev")
    for name in ("runtime", "build", "docs"):
        assert {package: dev[package] for package in locked(name) if package in dev}.items() <= locked(name).items()


def test_project_urls_begin_with_the_homepage() -> None:
    urls = PROJECT["urls"]
    assert urls.keys() == {"Homepage", "Documentation", "Source", "Issues", "Changelog"}
    assert [url for url in urls.values() if not url.startswith(urls["Homepage"])] == []


def test_image_is_built_from_one_base_and_locked_packages() -> None:
    text = (ROOT / "Dockerfile").read_text()
    assert re.findall(r"^FROM (\S+)", text, re.MULTILINE) == ["${BASE}", "${BASE}"]
    assert re.search(r"^ARG BASE=python:", text, re.MULTILINE)
    code = re.sub(r"^#.*\n", "", text, flags=re.MULTILINE).replace("\\\n", " ")
    for options in re.findall(r"pip (?:install|wheel)\s+(.*?)(?:&&|;|\n)", code):
        assert "--require-hashes" in options or "--no-deps" in options


@pytest.mark.parametrize("path", sorted((ROOT / ".github").rglob("*.yml")), ids=lambda path: path.name)
def test_file_of_the_repository_host_is_valid_yaml(path: Path) -> None:
    found = yaml.safe_load(path.read_text())
    if path.name in ("bug.yml", "feature.yml"):
        assert found.keys() >= {"name", "description", "body"}
        ids = [field["id"] for field in found["body"] if field["type"] != "markdown"]
        assert len(ids) == len({*ids})


def test_pre_commit_hooks_are_programs_of_this_project() -> None:
    (repo,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    programs = [hook["entry"].split()[0] for hook in repo["hooks"]]
    assert [program for program in programs if not (ROOT / program).exists()] == []
