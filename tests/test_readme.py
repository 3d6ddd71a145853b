"""The documents, compared with the code: commands, links, nouns, error codes and log fields."""

from __future__ import annotations

import os
import re
import shlex
from importlib.metadata import entry_points
from itertools import product
from pathlib import Path

import pytest

from lab.test_docs import Kind, blocks
from proxy.__main__ import main
from proxy.balancer.incompatibilities import IncompatibilityKind
from proxy.balancer.pick import TRIAL, PickPrediction
from proxy.common.backend import Backend, Role
from proxy.common.errors import Failure
from proxy.common.terms import Action, Stage
from proxy.observe.metrics import TERMS
from proxy.observe.record import RequestRecord, RequestTrace, access_line
from proxy.settings import load_settings
from proxy.settings.cli import DOCUMENTS
from proxy.sim.engine.cli import parse_arguments
from proxy.tools.advise import read_flags
from proxy.tools.launch.command import read_flags as read_launch_flags
from proxy.tools.roll.command import read_flags as read_roll_flags
from proxy.wire.openai import Api
from tests.reference_pages import errors

ROOT = Path(__file__).parent.parent
PAGES = {
    str(path.relative_to(ROOT)): path.read_text(encoding="utf-8")
    for path in [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
}
README = PAGES["README.md"]
GUIDES = {name: text for name, text in PAGES.items() if name == "README.md" or name.startswith("docs/")}
CONFIGS = sorted({*(ROOT / "configs").glob("*.yaml")} - {ROOT / "configs/full.yaml"})
SOURCES = [path for path in sorted((ROOT / "proxy").rglob("*.py")) if "sim" not in path.parts]
SUB_COMMANDS = ("print-config", "check-config", "doctor", "health", "top")
MAX_WORDS = {"README.md": 900, "DESIGN.md": 5000, "CONTRIBUTING.md": 900}
# Names that the pages give to the configuration of the reader.
FILES = ("my.yaml", "pdproxy.yaml")


def commands() -> list[list[str]]:
    """Return the words of each `pdproxy` command, without comments."""
    lines = [
        line.replace("\\\n", " ").removeprefix("pdproxy ")
        for name, text in GUIDES.items()
        for block in blocks(name, text)
        if block.kind in {Kind.COMMANDS, Kind.NOT_RUN}
        for line in block.commands
        if line.startswith("pdproxy ")
    ]
    return [shlex.split(line, comments=True) for line in lines]


def section(page: str, heading: str) -> str:
    """Return a section of a page of docs/, up to the next heading of any level."""
    _, _, rest = PAGES[f"docs/{page}"].partition(f"\n## {heading}\n")
    assert rest, f"{page} has no {heading}"
    return re.split(r"^#+ ", rest, maxsplit=1, flags=re.MULTILINE)[0]


def first_cells(text: str) -> list[list[str]]:
    """Return the names in the first cell of each row of a table."""
    return [re.findall(r"`([^`]+)`", cell) for cell in re.findall(r"^\| (.*?) \|", text, re.MULTILINE)]


def names(text: str) -> set[str]:
    return {name for cell in first_cells(text) for name in cell}


@pytest.mark.parametrize("name", MAX_WORDS)
def test_page_beside_the_source_is_short(name: str) -> None:
    assert len(PAGES[name].split()) <= MAX_WORDS[name], "references and figures belong into docs/"


def test_console_script_starts_the_program() -> None:
    (script,) = entry_points(group="console_scripts", name="pdproxy")
    assert script.load() is main


@pytest.mark.parametrize("words", commands(), ids=" ".join)
def test_commands_in_the_pages_are_valid(words: list[str], tmp_path: Path) -> None:
    if words[0] == "mock-engine":
        parse_arguments([word for word in words[1:] if word != "&"])
        return
    if words[0] == "advise":
        read_flags(words[1:])
        return
    if words[0] == "roll":
        read_roll_flags(words[1:])
        return
    if words[0] == "launch":
        assert read_launch_flags(words[1:]).topology.exists()
        return
    if words[1] in DOCUMENTS:
        assert main([word for word in words if word not in {">", "pdproxy.schema.json"}]) == 0
        return
    flags = words[words[0] in SUB_COMMANDS :]
    for name in FILES:
        (tmp_path / name).write_text("prefill: [a:1]\ndecode: [b:1]\n")
    found = load_settings([str(tmp_path / word) if word in FILES else word for word in flags], {})
    assert found.warnings == ()


def test_pages_have_commands_to_serve_and_to_check_the_configuration() -> None:
    assert {word for words in commands() for word in words if word in SUB_COMMANDS} >= {
        "print-config",
        "check-config",
        "doctor",
    }
    assert any(words[0].startswith("--") for words in commands())


# Debian and Ubuntu refuse pip outside of one (PEP 668).
def test_installations_use_a_virtual_environment() -> None:
    before, _, _ = README.partition("pip install .")
    assert before.splitlines()[-1].startswith("python3 -m venv ")


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_example_configuration_documents_its_command(path: Path) -> None:
    assert f"#   pdproxy --config configs/{path.name}\n" in path.read_text()


def anchors(text: str) -> set[str]:
    """Return the anchors of headings, as GitHub forms them."""
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("name", PAGES)
def test_links_between_pages_lead_somewhere(name: str) -> None:
    for target in re.findall(r"\]\(([^)]+)\)", PAGES[name]):
        file, _, anchor = target.partition("#")
        if not file.startswith("https://"):
            path = os.path.normpath(ROOT / name / ".." / file) if file else str(ROOT / name)
            assert Path(path).exists(), target
            assert not anchor or anchor in anchors(PAGES[os.path.relpath(path, ROOT)]), target


@pytest.mark.parametrize("name", PAGES)
def test_files_named_in_a_page_exist(name: str) -> None:
    named = re.findall(r"`((?:proxy|scripts|tests|configs)/[\w./-]*)", PAGES[name])
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_each_noun_of_the_design_is_a_class() -> None:
    section = PAGES["DESIGN.md"].partition("## The nouns\n")[2].partition("\n## ")[0]
    nouns = set(re.findall(r"^    (\w+) ", section, re.MULTILINE))
    classes = {name for path in SOURCES for name in re.findall(r"^class (\w+)", path.read_text(), re.MULTILINE)}
    assert 10 < len(nouns) <= 20
    assert nouns - classes == set()


def test_error_codes_differ_from_causes_of_instance_failures() -> None:
    assert not {f"{role}_{failure}" for role, failure in product(Role, Failure)} & errors.codes().keys()


def test_every_field_of_the_access_line_is_explained() -> None:
    record = RequestRecord(Api.CHAT, "id")
    record.lost_engines = 1
    record.request_trace = RequestTrace(f"00-{1:032x}-{1:016x}-01", record.clock, lambda: 1)
    timeline = record.add_timeline()
    timeline.entered_stages, timeline.stage_times = [Stage.ENCODE, None], [1.0, 2.0]
    timeline.prediction = PickPrediction(1.0, 0)
    timeline.attempts = 1
    timeline.prefill_pick = timeline.decode_pick = Backend(Role.PREFILL, "p", 1), TRIAL
    record.close_record()
    assert set(access_line(record.facts)) == names(PAGES["docs/reference/access-log.md"].partition("`term` has")[0])


def test_every_letter_of_a_term_is_explained() -> None:
    cells = re.findall(r"^\|(?: `(.)`)? \|.*?\| `(.)` \|", PAGES["docs/reference/access-log.md"], re.MULTILINE)
    first, second = ({letter for letter in column if letter} for column in zip(*cells, strict=True))
    assert {term[0] for term in TERMS} == first
    assert {term[1] for term in TERMS} == second == {"-", "R", *Stage}


def test_every_incompatibility_and_resume_action_is_explained() -> None:
    assert names(section("operate/incompatibilities.md", "Kinds")) == set(IncompatibilityKind)
    documented = re.findall(r"\| `(\w+)`(?::| at| \|)", section("concepts/resume.md", "Actions"))
    assert set(documented) == set(Action)
