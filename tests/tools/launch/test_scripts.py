"""Rendered scripts in a real shell, whose only programs are engines that print their arguments."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path

import pytest

from proxy.tools.launch.command import render_files
from tests.tools.launch.reading import engines, files_of, plan_of

_TELLING = """\
#!/bin/bash
printf '%s\\0' "$0" "$@" "$A" "$ASCEND_RT_VISIBLE_DEVICES" > "$TOLD/$$"
"""


@pytest.fixture
def shell(tmp_path: Path) -> dict[str, str]:
    """Return an environment for scripts with harmless programs."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "told").mkdir()
    for program in ("vllm", "python"):
        (tmp_path / "bin" / program).write_text(_TELLING)
        (tmp_path / "bin" / program).chmod(0o755)
    return {"PATH": str(tmp_path / "bin"), "TOLD": str(tmp_path / "told")}


def run(script: str, environment: dict[str, str], *words: str) -> list[list[str]]:
    """Return the words of each program that a script starts, with the variable A and the devices."""
    subprocess.run(["/bin/bash", "-c", script, "script", *words], env=environment, capture_output=True, check=False)
    told = [file.read_text().split("\0") for file in Path(environment["TOLD"]).iterdir()]
    return sorted([Path(program).name, *rest] for program, *rest, _ in told)


def test_template_gives_vllm_what_it_says(shell: dict[str, str]) -> None:
    """Also to the shell, whose quoting is not that of the reader of the other tests."""
    template = files_of("kimi-k2.6-2p2d")["d1/run_dp_template.sh"]
    words = ["0,1,2,3", "7100", "8", "4", "141.0.0.3", "12321", "4"]
    ((*given, _, devices),) = run(template, shell, *words)
    (_, expected), *_ = [each for each in engines(files_of("kimi-k2.6-2p2d")) if each[0] == "d1"]
    assert given == expected.words
    assert devices == "0,1,2,3"
    assert "'" in shlex.join(given), "nothing was quoted"


def test_variables_may_name_others_and_run_nothing(shell: dict[str, str]) -> None:
    environment = {"A": '$TOLD/a:${HOME} "$(vllm)" `vllm` \\ $1'}
    template = render_files(plan_of("kimi-k2.6-2p2d", environment=environment))["d1/run_dp_template.sh"]
    ((*_, a, _),) = run(template, {**shell, "HOME": "/home"}, "0", "7100", "8", "4", "141.0.0.3", "12321", "4")
    assert a == f'{shell["TOLD"]}/a:/home "$(vllm)" `vllm` \\ $1'


def test_rank_that_ends_takes_the_others_of_its_node_with_it(shell: dict[str, str]) -> None:
    programs = Path(shell["PATH"])
    (programs / "vllm").write_text('#!/bin/bash\n[[ "$*" != *"--port 7101"* ]] && exec /bin/sleep 60\n')
    (programs / "sleep").symlink_to("/bin/true")
    script = render_files(plan_of("kimi-k2.6-2p2d", launcher="serve_ranks"))["d1/decode-0.sh"]
    done = subprocess.run(["/bin/bash", "-c", script], env=shell, capture_output=True, check=False, timeout=60)
    assert done.returncode == 1


@pytest.mark.parametrize("launcher", ["launch_online_dp", "serve_ranks"])
def test_ranks_are_the_same_for_each_launcher(launcher: str) -> None:
    found = list(engines(render_files(plan_of("kimi-k2.6-2p2d", launcher=launcher))))
    assert [(node, each.environment["ASCEND_RT_VISIBLE_DEVICES"], each.flags["--port"]) for node, each in found] == [
        (node, devices, str(7100 + number))
        for node in ("p0", "p1", "d0", "d1")
        for number, devices in enumerate(("0,1,2,3", "4,5,6,7", "8,9,10,11", "12,13,14,15"))
    ]
    ranks = [each.flags["--data-parallel-rank"] for _, each in found]
    assert ranks == [str(rank) for rank in (*range(4), *range(4), *range(8))]
    (theirs, ours) = (
        [
            (each.words[2], sorted(each.flags.items(), key=str))
            for _, each in engines(render_files(plan_of("kimi-k2.6-2p2d", **given)))
        ]
        for given in ({}, {"launcher": launcher})
    )
    assert theirs == ours
