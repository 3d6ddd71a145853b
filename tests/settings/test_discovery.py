"""The options of discovery: where its files are, and that engines need not be named where they are found."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

import pytest

from proxy.settings import SettingsError, load

if TYPE_CHECKING:
    from pathlib import Path

    from proxy.settings import Settings


def settings(line: str = "", **environ: str) -> Settings:
    return load(shlex.split(line), environ).settings


def test_relative_paths_of_files_begin_where_the_file_is_that_has_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "etc" / "gateway.yaml"
    file.parent.mkdir()
    monkeypatch.chdir(tmp_path)
    file.write_text("discovery: {files: [engines/*.yaml, /abs.json]}", encoding="utf-8")
    assert settings(f"--config {file}").discovery.files == (f"{file.parent}/engines/*.yaml", "/abs.json")
    file.write_text("discovery: {files: 'a.yaml, b.yaml'}", encoding="utf-8")
    assert settings(f"--config {file}").discovery.files == (f"{file.parent}/a.yaml", f"{file.parent}/b.yaml")
    assert settings(PROXY_DISCOVERY__FILES="a.yaml,b.yaml").discovery.files == (
        f"{tmp_path}/a.yaml",
        f"{tmp_path}/b.yaml",
    )


def test_engines_that_are_found_need_not_be_named() -> None:
    assert settings(PROXY_DISCOVERY__FILES="/a.yaml").fleet == "0 prefillers, 0 decoders, 1 sources of discovery"
    assert settings("--decode d:1", PROXY_DISCOVERY__FILES="/a.yaml").fleet.startswith("0 prefillers, 1 decoders,")


@pytest.mark.parametrize(
    ("line", "files", "sentence"),
    [
        (
            "--connector auto",
            "/a.yaml",
            "connector auto asks the configured instances: name the connector if all are discovered",
        ),
        (
            "--connector auto --decode d:1",
            "/a.yaml",
            "connector auto asks the configured instances: name the connector if all are discovered",
        ),
        ("", "/a.yaml,/b.yaml,/a.yaml", "PROXY_DISCOVERY__FILES: /a.yaml is given twice"),
    ],
)
def test_what_cannot_be_is_refused(line: str, files: str, sentence: str) -> None:
    with pytest.raises(SettingsError) as refused:
        settings(line, PROXY_DISCOVERY__FILES=files)
    assert str(refused.value) == sentence
