"""The commands that the README and the example configurations tell people to type."""

from __future__ import annotations

import re
import shlex
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from proxy.__main__ import main
from proxy.settings import load

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))
SUB_COMMANDS = ("print-config", "check-config", "health")


def commands() -> list[list[str]]:
    """The words behind each indented `pdproxy`, without the comment."""
    lines = re.findall(r"^    pdproxy (.*)$", README.replace("\\\n", " "), re.MULTILINE)
    return [shlex.split(line, comments=True) for line in lines]


def test_the_console_script_is_the_program() -> None:
    (script,) = entry_points(group="console_scripts", name="pdproxy")
    assert script.load() is main


@pytest.mark.parametrize("words", commands(), ids=" ".join)
def test_a_command_of_the_readme_is_understood(words: list[str], tmp_path: Path) -> None:
    flags = words[words[0] in SUB_COMMANDS :]
    (tmp_path / "my.yaml").write_text("prefill: [a:1]\ndecode: [b:1]\n")
    found = load([str(tmp_path / word) if word == "my.yaml" else word for word in flags], {})
    assert found.warnings == ()


def test_the_readme_has_commands_to_serve_and_to_look_at_the_configuration() -> None:
    assert [word for words in commands() for word in words if word in SUB_COMMANDS] == ["print-config", "check-config"]
    assert any(words[0].startswith("--") for words in commands())


# Debian and Ubuntu refuse pip outside of one (PEP 668).
def test_what_is_installed_goes_into_a_virtual_environment() -> None:
    before, _, _ = README.partition("    pip install .")
    assert before.splitlines()[-1].startswith("    python3 -m venv ")


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_an_example_configuration_says_how_to_use_itself(path: Path) -> None:
    assert f"#   pdproxy --config configs/{path.name}\n" in path.read_text()
