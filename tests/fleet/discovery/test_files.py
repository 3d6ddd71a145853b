"""Instances in files: the format, changes, and files that are broken, missing or half written."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from proxy.common.backend import Backend
from proxy.fleet.discovery import files
from proxy.fleet.discovery.files import WatchedFiles, parse_groups

DECODERS = "- targets: [d:1, d:2]\n  labels: {role: decode}\n"


def names_of(backends: Sequence[Backend]) -> list[str]:
    return [
        f"{backend.role} {backend.name}" + (f" {backend.bootstrap_port}" if backend.bootstrap_port else "")
        for backend in backends
    ]


def replace_file(path: Path, text: str) -> None:
    """Replace a file in one step, so that no reader sees half of it."""
    new = path.with_name(f"{path.name}.new")
    new.write_text(text, encoding="utf-8")
    new.replace(path)


async def first(pattern: Path | str) -> list[str]:
    async with aclosing(WatchedFiles(str(pattern)).watch_instances()) as found:
        return names_of(await anext(found))


def test_groups_have_the_format_of_prometheus_and_a_role() -> None:
    found = parse_groups(
        [
            {"targets": ["10.0.0.1:7100", "[fd00::1]:7100"], "labels": {"role": "prefill", "bootstrap_port": "8998"}},
            {"targets": ["10.0.0.2:7100 9000"], "labels": {"role": "prefill", "bootstrap_port": 8998}},
            {"targets": ["d.example.com:7200-7201"], "labels": {"role": "decode", "rack": "7", "__path__": "/m"}},
            {"targets": [], "labels": {"role": "encode"}},
        ]
    )
    assert names_of(found) == [
        "prefill 10.0.0.1:7100 8998",
        "prefill [fd00::1]:7100 8998",
        "prefill 10.0.0.2:7100 9000",
        "decode d.example.com:7200",
        "decode d.example.com:7201",
    ]
    assert all(backend.is_trusted for backend in found)


def test_group_may_name_the_models_of_its_instances() -> None:
    found = parse_groups(
        [
            {"targets": ["p:1", "p:2 model=z"], "labels": {"role": "prefill", "model": "x, org/y"}},
            {"targets": ["d:1"], "labels": {"role": "decode"}},
        ]
    )
    assert [backend.models for backend in found] == [("x", "org/y"), ("z",), ()]
    with pytest.raises(ValueError, match="group 1: the names of an instance's models"):
        parse_groups([{"targets": ["p:1"], "labels": {"role": "prefill", "model": "x" * 300}}])


def test_label_makes_the_instances_of_a_group_elastic() -> None:
    labels = {"role": "decode", "elastic": "true", "bootstrap_port": 8998}
    groups = [{"targets": ["e:1"], "labels": labels}, {"targets": ["d:1"], "labels": {"role": "decode"}}]
    assert [(one.is_elastic, one.bootstrap_port) for one in parse_groups(groups)] == [(True, 8998), (False, None)]


@pytest.mark.parametrize(
    ("groups", "why"),
    [
        (None, "there must be a list of groups"),
        ({"targets": ["d:1"]}, "there must be a list of groups"),
        (["d:1"], "group 1 must have targets"),
        ([{"labels": {"role": "decode"}}], "group 1 must have targets"),
        ([{"targets": "d:1", "labels": {"role": "decode"}}], "group 1 must have targets"),
        ([{"targets": [7], "labels": {"role": "decode"}}], "group 1 must have targets"),
        ([{"targets": ["d:1"]}], "group 1 must have the label role"),
        ([{"targets": ["d:1"], "labels": ["role"]}], "group 1 must have the label role"),
        ([{"targets": ["d:1"], "labels": {"role": "decoder"}}], "group 1 must have the label role"),
        ([{"targets": ["d:1"], "labels": {"role": ["decode"]}}], "group 1 must have the label role"),
        ([{"targets": ["d"], "labels": {"role": "decode"}}], "group 1: 'd' has no port"),
        ([{"targets": ["p:1"], "labels": {"role": "prefill", "bootstrap_port": "x"}}], "group 1: bootstrap_port must"),
        ([{"targets": ["p:1"], "labels": {"role": "prefill", "bootstrap_port": 70000}}], "group 1: bootstrap_port"),
        ([{"targets": ["d:1"], "labels": {"role": "decode", "bootstrap_port": 1}}], "group 1 has a bootstrap_port"),
        ([{"targets": ["d:1"], "labels": {"role": "decode", "elastic": "yes"}}], "group 1: elastic must be true"),
    ],
)
def test_error_describes_the_problem_of_a_list(groups: Any, why: str) -> None:
    with pytest.raises(ValueError, match="^" + why):
        parse_groups(groups)


async def test_json_and_yaml_give_the_same_instances(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(DECODERS, encoding="utf-8")
    group = {"targets": ["d:1", "d:2"], "labels": {"role": "decode"}}
    (tmp_path / "a.json").write_text(json.dumps([group]), encoding="utf-8")
    assert await first(tmp_path / "a.yaml") == await first(tmp_path / "a.json") == ["decode d:1", "decode d:2"]


@pytest.mark.parametrize(
    ("name", "text", "why"),
    [
        ("a.yaml", None, "a.yaml cannot be read: no such file or directory"),
        ("*.yaml", None, r"no file matches .*/\*.yaml"),
        ("a.yaml", "", "a.yaml: there must be a list of groups"),
        ("a.yaml", "- targets: [d:1", "a.yaml, line 1: "),
        ("a.yaml", "- targets: [d:1]", "a.yaml: group 1 must have the label role"),
        ("a.json", '[{"targets"', "a.json: unexpected end of data"),
        ("*.yaml", "- targets: [d:1]", "a.yaml: group 1 must have the label role"),
    ],
)
async def test_broken_or_missing_file_is_a_failure_of_its_source(
    tmp_path: Path, name: str, text: str | None, why: str
) -> None:
    if text is not None:
        (tmp_path / name.replace("*", "a")).write_text(text, encoding="utf-8")
    with pytest.raises((OSError, ValueError), match=why):
        await first(tmp_path / name)


async def test_watch_yields_changes_when_files_appear_and_disappear(tmp_path: Path) -> None:
    one, other = tmp_path / "a.yaml", tmp_path / "b.yaml"
    one.write_text(DECODERS, encoding="utf-8")
    async with aclosing(WatchedFiles(str(tmp_path / "*.yaml"), check_seconds=0.001).watch_instances()) as found:
        assert names_of(await anext(found)) == ["decode d:1", "decode d:2"]
        replace_file(other, DECODERS.replace("d:2", "d:3"))
        assert names_of(await anext(found)) == ["decode d:1", "decode d:2", "decode d:1", "decode d:3"]
        replace_file(one, "[]")
        assert names_of(await anext(found)) == ["decode d:1", "decode d:3"]
        other.unlink()
        assert names_of(await anext(found)) == []


async def test_file_is_not_read_while_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(DECODERS, encoding="utf-8")
    group = "- targets: [d:3]\n  labels: {role: decode}\n"
    steps = ["", group, group * 2, group * 3]  # after each step, the file is valid
    look = files._file_stamps

    def written_between_looks(pattern: str) -> files.FileStamps:
        if steps:
            path.write_text(DECODERS + steps.pop(0), encoding="utf-8")
        return look(pattern)

    monkeypatch.setattr(files, "_file_stamps", written_between_looks)
    async with aclosing(WatchedFiles(str(path), check_seconds=0.0).watch_instances()) as found:
        assert names_of(await anext(found)) == ["decode d:1", "decode d:2"]
        assert names_of(await anext(found)) == ["decode d:1", "decode d:2", *["decode d:3"] * 3]
