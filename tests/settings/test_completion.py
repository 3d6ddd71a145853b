"""What shells complete with the script that the program prints, and what sub-commands say of themselves."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from proxy.__main__ import main
from proxy.settings.cli import COMMANDS
from proxy.settings.kinds import DECODE_POLICIES
from proxy.settings.other_routers import ACCEPTED_FLAGS


@pytest.fixture
def complete(capsys: pytest.CaptureFixture[str]) -> Callable[[str], set[str]]:
    """Return the completions that the shell offers for these words; the last one is incomplete."""
    script = _printed(capsys)

    def offered(line: str) -> set[str]:
        words = line.split(" ")
        quoted = " ".join(f"'{word}'" for word in words)
        asking = f'COMP_WORDS=({quoted}); COMP_CWORD={len(words) - 1}; _pdproxy; printf "%s\\n" "${{COMPREPLY[@]}}"'
        done = subprocess.run(
            ["bash", "--norc", "-c", f"{script}\n{asking}"], capture_output=True, text=True, check=True
        )
        assert done.stderr == ""
        return set(done.stdout.split())

    return offered


def _printed(capsys: pytest.CaptureFixture[str], shell: str = "bash") -> str:
    assert main(["completion", shell]) == 0
    return capsys.readouterr().out


def test_bash_completes_sub_commands_flags_and_policies(complete: Callable[[str], set[str]]) -> None:
    assert complete("pdproxy ") >= {*COMMANDS, "--prefill", "--config"}
    assert complete("pdproxy pr") == {"print-config"}
    assert complete("pdproxy --prefiller-") == {"--prefiller-hosts", "--prefiller-ports"}
    assert complete("pdproxy --connector vllm_") == {"vllm_pull", "vllm_store"}
    assert complete("pdproxy --port 1 --decode-policy ") == {*DECODE_POLICIES}
    assert complete("pdproxy doctor --js") == {"--json"}
    assert complete("pdproxy doctor --prefiller-h") == {"--prefiller-hosts"}
    assert complete("pdproxy mock-engine --ro") == {"--role"}
    assert complete("pdproxy launch ") >= {"render", "check", "--output"}
    assert complete("pdproxy completion ") == {"bash", "zsh", "fish"}
    assert complete("pdproxy help ro") == {"roll"}
    assert complete("pdproxy check-config --config /e") == set()  # so that files are completed


def test_flags_in_the_prose_of_help_are_not_completed(complete: Callable[[str], set[str]]) -> None:
    assert complete("pdproxy ").isdisjoint(("--pd-hosts", *ACCEPTED_FLAGS))


def test_fish_script_has_every_sub_command_with_its_flags(capsys: pytest.CaptureFixture[str]) -> None:
    lines = _printed(capsys, "fish").splitlines()
    for command in COMMANDS:
        assert any(f" -a {command} -d " in line for line in lines)
    behind = "complete -c pdproxy -n '__fish_pdproxy_behind"
    assert f'{behind} "doctor"\' -l json' in lines
    assert f'{behind} "check-config"\' -l config -r -F' in lines
    assert f"{behind} \"\"' -l decode-policy -x -a '{' '.join(DECODE_POLICIES)}'" in lines
    assert f'{behind} "completion"\' -a fish' in lines


@pytest.mark.skipif(shutil.which("fish") is None, reason="needs fish")
@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("pdproxy pr", {"print-config"}),
        ("pdproxy --connector vllm_", {"vllm_pull", "vllm_store"}),
        ("pdproxy doctor --js", {"--json"}),
        ("pdproxy completion ", {"bash", "zsh", "fish"}),
    ],
)
def test_fish_completes_as_bash_does(
    line: str, offered: set[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "pdproxy.fish"
    script.write_text(_printed(capsys, "fish"), encoding="utf-8")
    asking = ["fish", "--no-config", "-c", f"source {script}; complete -C '{line}'"]
    done = subprocess.run(asking, capture_output=True, text=True, check=True)
    assert {answer.partition("\t")[0] for answer in done.stdout.splitlines()} == offered


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_a_sub_command_lists_its_options(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        assert main([command, "--help"]) == 0
    except SystemExit as left:
        assert left.code == 0  # noqa: PT017 argparse leaves after its help
    assert capsys.readouterr().out.startswith(f"usage: pdproxy {command} ")


@pytest.mark.parametrize("words", [[], ["tcsh"], ["bash", "zsh"]])
def test_completion_rejects_an_unsupported_shell_with_a_message(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["completion", *words]) == 2
    assert "bash, zsh or fish" in capsys.readouterr().err
