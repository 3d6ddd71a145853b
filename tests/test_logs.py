"""One line per record, whatever is in it; every line names its request."""

from __future__ import annotations

import io
import json
import logging
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy import logs
from proxy.settings import Log

if TYPE_CHECKING:
    from collections.abc import Iterator

logger = logging.getLogger("proxy.somewhere")


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    root, ours = logging.getLogger(), logging.getLogger("proxy")
    before = root.handlers[:], root.level, ours.level
    yield
    root.handlers[:] = before[0]
    root.setLevel(before[1])
    ours.setLevel(before[2])


def start(log: Log) -> io.StringIO:
    stream = io.StringIO()
    logs.setup(log, stream)
    return stream


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_text_begins_with_time_level_and_logger() -> None:
    stream = start(Log(format="text"))
    logger.warning("%s is down", "10.0.0.1:7100")
    time, rest = stream.getvalue().split(" ", 1)
    assert rest == "WARNING proxy.somewhere 10.0.0.1:7100 is down\n"
    assert len(time) == len("2026-01-31T12:00:00.000Z")
    assert time.endswith("Z")


def test_json_is_one_object_per_line() -> None:
    stream = start(Log(format="json"))
    logger.info("two\nlines")
    logs.access_line({"id": "r1", "code": 200, "dur": 0.25, "p": None, "stream": True})
    first, second = map(json.loads, stream.getvalue().splitlines())
    assert first["message"] == "two\nlines"
    assert (first["level"], first["logger"]) == ("INFO", "proxy.somewhere")
    assert second.items() >= {"id": "r1", "code": 200, "dur": 0.25, "p": None, "stream": True}.items()


def test_auto_means_text_on_a_terminal_and_json_elsewhere() -> None:
    file = start(Log(format="auto"))
    logger.info("hello")
    assert json.loads(file.getvalue())["message"] == "hello"
    terminal = Terminal()
    logs.setup(Log(format="auto"), terminal)
    logger.info("hello")
    assert terminal.getvalue().endswith(" INFO proxy.somewhere hello\n")


def test_an_access_line_has_one_word_per_field() -> None:
    stream = start(Log(format="text"))
    logs.access_line({"id": "r1", "p": None, "dur": 0.12345, "code": 200, "stream": False, "term": "--"})
    assert stream.getvalue().endswith(" request id=r1 p=- dur=0.123 code=200 stream=false term=--\n")


def test_the_level_is_the_one_configured_and_libraries_only_warn() -> None:
    stream = start(Log(format="text", level="WARNING"))
    logger.info("unseen")
    logs.access_line({"id": "unseen"})
    assert stream.getvalue() == ""
    logs.setup(Log(format="text", level="DEBUG"), stream)
    logger.debug("seen")
    logging.getLogger("aiohttp").info("unseen")
    logging.getLogger("aiohttp").warning("seen, too")
    assert [line.split(" ", 3)[3] for line in stream.getvalue().splitlines()] == ["seen", "seen, too"]


def test_setting_up_again_does_not_write_twice() -> None:
    start(Log(format="text"))
    stream = start(Log(format="text"))
    logger.info("once")
    assert stream.getvalue().count("once") == 1


@pytest.mark.parametrize("format", ["text", "json"])
def test_lines_of_a_request_carry_its_id_once(format: str) -> None:
    stream = start(Log.model_validate({"format": format}))
    token = logs.request_id.set("r-42")
    try:
        logger.info("on its way")
        logs.access_line({"id": "r-42", "code": 200})
    finally:
        logs.request_id.reset(token)
    logger.info("later")
    assert [line.count("r-42") for line in stream.getvalue().splitlines()] == [1, 1, 0]


@pytest.mark.parametrize("format", ["text", "json"])
@given(value=st.text(st.characters(codec=None)))
def test_no_value_can_break_its_line(format: str, value: str) -> None:
    stream = start(Log.model_validate({"format": format}))
    logger.warning("refused %s", value)
    logs.access_line({"id": "r1", "model": value, "code": 200})
    lines = stream.getvalue().split("\n")
    assert len(lines) == 3
    assert all(line.isprintable() for line in lines)
    stream.getvalue().encode()
    if format == "json":
        assert json.loads(lines[1])["model"] == value
    else:
        assert lines[1].endswith(" code=200")


@given(value=st.text(st.characters(codec=None)))
def test_a_text_field_can_be_read_back(value: str) -> None:
    stream = start(Log(format="text"))
    logs.access_line({"model": value})
    written = stream.getvalue().split(" model=", 1)[1].removesuffix("\n")
    assert (json.loads(written) if written.startswith('"') else written) == value


def test_an_exceptions_text_cannot_look_like_a_record() -> None:
    stream = start(Log(format="text"))
    try:
        raise ValueError("first\n2026-01-31T12:00:00.000Z INFO proxy.access request id=forged\x1b[2K")
    except ValueError:
        logger.exception("failed")
    first, *rest = stream.getvalue().splitlines()
    assert first.endswith(" ERROR proxy.somewhere failed")
    assert all(line.startswith("    ") and line.isprintable() for line in rest)


def test_a_traceback_is_a_member_of_its_json_line() -> None:
    stream = start(Log(format="json"))
    try:
        raise ValueError("oops")
    except ValueError:
        logger.exception("failed")
    (line,) = stream.getvalue().splitlines()
    assert json.loads(line)["traceback"].endswith("ValueError: oops")
