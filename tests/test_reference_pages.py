"""The generated pages of docs/reference: they are up to date, and complete."""

from __future__ import annotations

import re

import pytest

from proxy.api.openapi import OPERATIONS
from proxy.common.errors import Failure
from proxy.process.configuration import FIXED
from proxy.settings.cli import COMMANDS
from proxy.settings.sources import OPTIONS
from tests.real.results import recorded
from tests.reference_pages import COMMAND, DOCS, PAGES, command_line, errors, options, real_engines


@pytest.mark.parametrize("name", PAGES)
def test_page_is_up_to_date(name: str) -> None:
    assert (DOCS / name).read_text(encoding="utf-8") == PAGES[name](), f"{name} is stale; write it with {COMMAND}"


def test_options_page_has_every_option_with_its_restart() -> None:
    _, *entries = options.page().split("\n### ")
    restarts = {entry.partition("\n")[0]: "Restart: required" in entry for entry in entries}
    assert {option for option, needs_restart in restarts.items() if needs_restart} == {*FIXED}
    assert restarts.keys() == OPTIONS.keys()


def test_number_has_its_unit_range_and_flag() -> None:
    page = options.page()
    assert "Type: number · Unit: seconds · Range: above 0 · Default: `2.0` · Environment: `PROXY_TIMEOUTS__" in page
    assert "Type: number or `null` · Range: 0 to 1 · Default: `null`" in page
    assert "Environment: `PROXY_LISTEN__PORT` · Flag: `--port` · Restart: required" in page


@pytest.mark.parametrize("command", COMMANDS)
def test_command_has_a_section_with_all_of_its_flags(command: str) -> None:
    sections = dict(part.split("\n", 1) for part in command_line.page().split("\n## ")[1:])
    parser = command_line.parser_of(command)
    shared = "serve" if "Takes the flags of" in sections[command] else command
    for action in parser._actions if parser else ():
        for flag in set(action.option_strings) - {"-h", "--help"}:
            assert flag in sections[command] + sections[shared]


def test_every_error_code_is_explained_and_no_other() -> None:
    assert errors.documented().keys() == errors.codes().keys()
    assert errors.texts()["failures"].keys() == {*Failure}


@pytest.mark.parametrize("code", sorted(errors.codes()))
def test_error_code_has_the_statuses_of_the_source(code: str) -> None:
    documented = errors.documented()[code]
    assert errors.codes()[code] <= documented or documented == {"any"}


def test_endpoints_page_has_every_described_route_and_no_other() -> None:
    page = (DOCS / "reference" / "endpoints.md").read_text(encoding="utf-8")
    cells = re.findall(r"^\| (`.*?) \|", page, re.MULTILINE)
    assert {path for cell in cells for path in re.findall(r"`(?:GET |POST )?(/[^`]*)`", cell)} == {*OPERATIONS}


def test_recorded_results_are_of_tests_and_stacks_that_exist() -> None:
    known = {(stack, test.name) for test in real_engines.tests() for stack in test.stacks}
    assert {(result.stack, result.test) for result in recorded()} <= known


def test_tests_without_real_proof_exist() -> None:
    assert all((DOCS.parent / test).exists() for _, _, test in real_engines.ONLY_IN_V33)
