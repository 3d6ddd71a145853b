"""Log lines: their format, secrets, limits for similar lines, and slow readers."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.observe import logs
from proxy.observe.logs.handler import (
    MAX_TRACEBACK_CHARS,
    JsonFormatter,
    LineFormatter,
    access_record,
    encode_line,
)
from proxy.observe.logs.lines import (
    BURST_LINES,
    LINES_PER_SECOND,
    MAX_KEPT_BYTES,
    MAX_VALUE_CHARS,
    LineWriter,
    Redaction,
)
from proxy.settings import Log
from tests.clock import Clock

logger = logging.getLogger("proxy.somewhere")
library = logging.getLogger("library")

FORMATS = ["text", "json"]
MASKED = "Bearer 0123456789abcdef"
LONG = "x" * (MAX_VALUE_CHARS + 1)
pytestmark = pytest.mark.usefixtures("logging_as_before")


@pytest.fixture(autouse=True)
def closed_files() -> Iterator[None]:
    yield
    while File.opened:
        File.opened.pop().close()


class File:
    """A log file that is open until the end of the test."""

    opened: ClassVar[list[IO[str]]] = []

    def __init__(self, format: str, level: str = "INFO", **options: Any) -> None:
        self._file = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self.opened.append(self._file)
        logs.set_up_logging(Log.model_validate({"format": format, "level": level}), self._file, **options)

    @property
    def text(self) -> str:
        return os.pread(self._file.fileno(), 1 << 24, 0).decode()

    @property
    def lines(self) -> list[str]:
        return self.text.split("\n")[:-1]

    @property
    def objects(self) -> list[dict[str, Any]]:
        return list(map(json.loads, self.lines))


# --- formats ----------------------------------------------------------------------------------------------------------


def test_text_begins_with_time_level_and_logger() -> None:
    file = File("text")
    logger.warning("%s is down", "10.0.0.1:7100")
    time, rest = file.text.split(" ", 1)
    assert rest == "WARNING proxy.somewhere 10.0.0.1:7100 is down\n"
    assert len(time) == len("2026-01-31T12:00:00.000Z")
    assert time.endswith("Z")


def test_json_is_one_object_per_line() -> None:
    file = File("json")
    logger.info("two\nlines")
    logs.access_line({"id": "r1", "code": 200, "dur": 0.25, "p": None, "stream": True})
    first, second = file.objects
    assert first["message"] == "two\nlines"
    assert (first["level"], first["logger"]) == ("INFO", "proxy.somewhere")
    assert second.items() >= {"id": "r1", "code": 200, "dur": 0.25, "p": None, "stream": True}.items()


def test_auto_format_is_text_on_a_terminal_and_json_otherwise() -> None:
    file = File("auto")
    logger.info("hello")
    assert file.objects[0]["message"] == "hello"
    screen, terminal = os.openpty()
    with open(screen, "rb") as reader, open(terminal, "w") as stream:
        logs.set_up_logging(Log(format="auto"), stream)
        logger.info("hello")
        assert reader.readline().endswith(b" INFO proxy.somewhere hello\r\n")
        assert os.get_blocking(terminal)  # the shell shares this flag


def test_access_line_has_one_word_per_field() -> None:
    file = File("text")
    logs.access_line({"id": "r1", "p": None, "dur": 0.12345, "code": 200, "stream": False, "term": "--"})
    assert file.text.endswith(" request id=r1 p=- dur=0.123 code=200 stream=false term=--\n")


def test_configured_level_applies_and_libraries_only_warn() -> None:
    file = File("text", level="WARNING")
    logger.info("unseen")
    logs.access_line({"id": "unseen"})
    assert file.text == ""
    logs.set_level("DEBUG")
    logger.debug("seen")
    library.info("unseen")
    library.warning("seen, too")
    assert [line.split(" ", 3)[3] for line in file.lines] == ["seen", "seen, too"]


def test_second_setup_does_not_duplicate_lines() -> None:
    File("text")
    file = File("text")
    logger.info("once")
    assert file.text.count("once") == 1


@pytest.mark.parametrize("format", FORMATS)
def test_lines_of_a_request_carry_its_id_once(format: str) -> None:
    file = File(format)
    token = logs.request_id.set("r-42")
    try:
        logger.info("on its way")
        logs.access_line({"id": "r-42", "code": 200})
    finally:
        logs.request_id.reset(token)
    logger.info("later")
    assert [line.count("r-42") for line in file.lines] == [1, 1, 0]


def test_invalid_log_call_is_reported_in_its_line(capfd: pytest.CaptureFixture[str]) -> None:
    file = File("text")
    logger.info("%d tokens", "many")
    logger.info("and on")
    first, second = file.lines
    assert " ERROR proxy.logs bad log call in test_logs.py:" in first
    assert second.endswith(" and on")
    assert capfd.readouterr().err == ""


def test_logging_after_close_writes_nothing_and_does_not_fail() -> None:
    file = File("text")
    (handler,) = logging.getLogger().handlers
    handler.close()  # as Python does when it ends
    logger.info("too late")
    logs.flush()
    assert file.text == ""


# --- hostile values ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", FORMATS)
@settings(deadline=None)
@given(value=st.text(st.characters(codec=None)))
def test_any_value_stays_in_one_line(format: str, value: str) -> None:
    file = File(format)
    logger.warning("refused %s", value)
    logs.access_line({"id": "r1", "model": value, "code": 200})
    assert len(file.lines) == 2
    assert all(line.isprintable() for line in file.lines)
    if format == "json":
        assert file.objects[1]["model"] == value
    else:
        assert file.lines[1].endswith(" code=200")


@given(
    fields=st.dictionaries(
        st.sampled_from(["id", "key", "code", "dur", "p", "error"]),
        st.text(st.characters(codec=None)) | st.floats() | st.integers() | st.none() | st.just(MASKED) | st.just(LONG),
    )
)
def test_fast_access_line_equals_the_formatted_one(fields: dict[str, object]) -> None:
    formatter = JsonFormatter(Redaction())
    line = formatter.format_request(1_700_000_000.25, fields)
    assert line == LineFormatter.format_request(formatter, 1_700_000_000.25, fields)
    if "error" in fields and fields["error"] is not None:
        assert line == encode_line(formatter.format(access_record(1_700_000_000.25, fields)))


@settings(deadline=None)
@given(value=st.text(st.characters(codec=None)))
def test_text_field_can_be_parsed(value: str) -> None:
    file = File("text")
    logs.access_line({"model": value})
    written = file.text.split(" model=", 1)[1].removesuffix("\n")
    assert (json.loads(written) if written.startswith('"') else written) == value


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(
    "hostile",
    ["\u2028", "\u2029", "\x85", "\x1b[2J\x1b[31m", "\x9b2J", "\ud800", "\udfff\ud83d", "\x00", "\u202e", "\r\n"],
)
def test_control_characters_are_escaped(format: str, hostile: str) -> None:
    file = File(format)
    logger.warning("refused %s", hostile)
    logs.access_line({"id": "r1", "error": hostile})
    library.warning(hostile)
    assert len(file.text.splitlines()) == 3  # splitlines knows more line ends than \n
    assert all(line.isprintable() for line in file.lines)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("value", ["a" * 65536, "\n" * 65536, b"a" * 65536, ["a" * 65536], ValueError("a" * 65536)])
def test_long_value_is_cut(format: str, value: object) -> None:
    file = File(format)
    logger.warning("refused %s", value)
    logs.access_line({"id": "r1", "error": value, "code": 400})
    first, second = file.lines
    assert len(first) < 3 * MAX_VALUE_CHARS
    assert len(second) < 3 * MAX_VALUE_CHARS
    assert "…" in first or "\\u2026" in first
    assert "400" in second


@pytest.mark.parametrize("format", FORMATS)
def test_long_exception_shows_its_origin_and_its_message(format: str) -> None:
    file = File(format)
    try:
        raise ValueError("a" * 65536 + "at last") from None  # without the context of compiled code
    except ValueError:
        logger.exception("failed")
    assert len(file.text) < 1.1 * MAX_TRACEBACK_CHARS
    assert "in test_long_exception_shows_its_origin_and_its_message" in file.text
    assert "at last" in file.text


def test_text_of_an_exception_cannot_look_like_a_record() -> None:
    file = File("text")
    try:
        raise ValueError("first\n2026-01-31T12:00:00.000Z INFO proxy.access request id=forged\x1b[2K")
    except ValueError:
        logger.exception("failed")
    first, *rest = file.lines
    assert first.endswith(" ERROR proxy.somewhere failed")
    assert all(line.startswith("    ") and line.isprintable() for line in rest)


def test_traceback_is_a_member_of_its_json_line() -> None:
    file = File("json")
    try:
        raise ValueError("oops\n\ud800")
    except ValueError:
        logger.exception("failed")
    assert file.objects[0]["traceback"].endswith("ValueError: oops\n\ud800")


# --- secrets ----------------------------------------------------------------------------------------------------------

SECRETS = ('pass"word\\é', "password-of-the-admin", "password", "short")


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(
    ("secret", "masked"),
    [
        ("Authorization: Bearer abc.def-123/4+5==", "Authorization: Bearer ***"),
        ("authorization: BEARER  abcdefgh", "authorization: BEARER  ***"),
        ("sk-proj-abcdefgh_12345678", "sk-***"),
        ("key=sk-abcdefgh,", "key=sk-***,"),
        ("password-of-the-admin", "***"),
        ("xpasswordx", "x***x"),
        ('<pass"word\\é>', "<***>"),
        ("short", "short"),
        ("task-12345678 risk-abcdefghij", "task-12345678 risk-abcdefghij"),
        ("a bearer of news", "a bearer of news"),
    ],
)
def test_no_secret_is_written(format: str, secret: str, masked: str) -> None:
    file = File(format, secrets=SECRETS)
    logger.warning("got %s", secret)
    logs.access_line({"id": "r1", "error": secret})
    try:
        raise ValueError(secret)
    except ValueError:
        logger.exception("failed")
    if format == "json":
        message, access, failure = file.objects
        assert message["message"] == f"got {masked}"
        assert access["error"] == masked
        assert failure["traceback"].endswith(f"ValueError: {masked}")
    else:
        assert file.lines[0].endswith(f"got {masked}")
        assert masked in file.lines[1] or json.dumps(masked)[1:-1] in file.lines[1]
        assert file.lines[-1].endswith(f"ValueError: {masked}")
        assert secret == masked or secret not in file.text


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("chars", range(MAX_VALUE_CHARS - 10, MAX_VALUE_CHARS + 2))
def test_cut_value_has_no_part_of_a_secret(format: str, chars: int) -> None:
    file = File(format, secrets=SECRETS)
    value = "x" * chars + "password-of-the-admin" + "y" * MAX_VALUE_CHARS
    logger.warning("%s", value)
    logs.access_line({"id": "r1", "error": value})
    assert "xp" not in file.text


@pytest.mark.parametrize("format", FORMATS)
def test_cut_traceback_has_no_part_of_a_secret(format: str) -> None:
    file = File(format, secrets=SECRETS)
    try:
        raise ValueError("x" * MAX_TRACEBACK_CHARS + "password-of-the-admin" + "y" * (MAX_TRACEBACK_CHARS // 2 - 5))
    except ValueError:
        logger.exception("failed")
    assert "yyy" in file.text
    assert "adminy" not in file.text


# --- floods -----------------------------------------------------------------------------------------------------------


def refusal(code: int = 400, term: str = "PR") -> None:
    logs.access_line({"id": "r1", "code": code, "term": term, "error": "the body is not JSON"})


def test_ten_thousand_invalid_requests_write_few_lines(clock: Clock) -> None:
    file = File("json", clock=clock)
    for _ in range(10_000):
        refusal()
        clock.now += 0.001
    clock.now += 1.0
    logs.flush()
    assert len(file.text) < 50_000
    assert logs.count_lost_lines().suppressed == 10_000 - sum("id" in line for line in file.objects)
    assert sum(line.get("suppressed", 0) for line in file.objects) == logs.count_lost_lines().suppressed


def test_lines_pass_at_a_fixed_rate_after_a_burst(clock: Clock) -> None:
    file = File("text", clock=clock)
    for _ in range(2 * BURST_LINES):
        refusal()
    assert len(file.lines) == BURST_LINES
    for _ in range(10):
        clock.now += 1 / LINES_PER_SECOND
        refusal()
        refusal()
    assert len(file.lines) == BURST_LINES + 10
    assert [line.rpartition(" suppressed=")[2] for line in file.lines[BURST_LINES:]] == [str(BURST_LINES), *["1"] * 9]
    clock.now += 3600.0
    for _ in range(2 * BURST_LINES):
        refusal()
    assert len(file.lines) == 2 * BURST_LINES + 10


def test_number_of_suppressed_lines_is_logged_after_a_second(clock: Clock) -> None:
    file = File("json", clock=clock)
    for number in range(BURST_LINES + 7):
        refusal(413, "PR")
        logger.warning("connection %d is refused", number)
    clock.now += 0.9
    logs.flush()
    assert len(file.lines) == 2 * BURST_LINES
    clock.now += 0.1
    logs.flush()
    logs.flush()
    requests, connections = file.objects[2 * BURST_LINES :]
    assert (requests["logger"], requests["level"]) == ("proxy.access", "INFO")
    assert (requests["message"], requests["term"], requests["code"]) == ("left out: request", "PR", 413)
    assert (connections["logger"], connections["level"]) == ("proxy.somewhere", "WARNING")
    assert connections["message"] == "left out: connection %d is refused"
    assert requests["suppressed"] == connections["suppressed"] == 7
    assert logs.count_lost_lines() == (0, 14)


@pytest.mark.parametrize(
    ("fields", "lines"),
    [
        ({"term": "--", "code": 200}, 100),
        ({"term": "SF", "code": 502}, 100),
        ({"term": "CT", "code": 499}, 100),
        ({"instance": "10.0.0.1:7100", "code": 400}, 100),
        ({"term": "PR", "code": 400}, BURST_LINES),
        ({"term": "PQ", "code": 503}, BURST_LINES),
        ({"term": "PF", "code": 503}, BURST_LINES),
        ({"term": "CR", "code": 499}, BURST_LINES),
        ({"term": "CQ", "code": 499}, BURST_LINES),
        ({"instance": "-", "code": 404}, BURST_LINES),
    ],
)
def test_only_lines_of_requests_without_an_engine_are_suppressed(
    clock: Clock, fields: dict[str, object], lines: int
) -> None:
    file = File("json", clock=clock)
    for _ in range(100):
        logs.access_line({"id": "r1", **fields})
    assert len(file.lines) == lines


def test_each_kind_of_line_has_its_limit(clock: Clock) -> None:
    file = File("json", clock=clock)
    for number in range(100):
        refusal(400)
        refusal(413)
        logger.warning("%d failed", number)
        logger.info("%d begun", number)
        library.warning(f"something strange {number}")
        library.error(f"something else {number}")
    assert len(file.lines) == 6 * BURST_LINES


def test_access_lines_above_the_limits_are_written(clock: Clock) -> None:
    file = File("json", clock=clock)
    for number in range(100):
        logger.warning("instance %d is down", number, extra=logs.ALWAYS)
    assert len(file.lines) == 100


# --- readers of the log -----------------------------------------------------------------------------------------------


@contextmanager
def pipe() -> Iterator[tuple[int, IO[str]]]:
    """Open a pipe. Yields its end for non-blocking reads, and its end for writes."""
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    with open(writer, "w") as stream:
        try:
            yield reader, stream
        finally:
            os.close(reader)


def read(fd: int, most: int = 1 << 24) -> bytes:
    """Return the available bytes without waiting."""
    try:
        return os.read(fd, most)
    except BlockingIOError:
        return b""


def read_all(fd: int) -> list[dict[str, Any]]:
    """Read the pipe to its end, and return its lines."""
    received = b""
    while piece := read(fd):
        received += piece
        logs.flush()
    assert received.endswith(b"\n")
    return list(map(json.loads, received.splitlines()))


def test_unread_pipe_never_blocks_the_writer() -> None:
    with pipe() as (reader, stream):
        logs.set_up_logging(Log(format="json"), stream)
        for number in range(10_000):
            logs.access_line({"id": number, "padding": "x" * 500})
        assert os.get_blocking(stream.fileno())  # other users of the description share this flag
        dropped = logs.count_lost_lines().dropped
        *lines, notice = read_all(reader)
        assert [line["id"] for line in lines] == list(
            range(10_000 - dropped)
        )  # the oldest lines, in order and complete
        assert sum(len(json.dumps(line)) for line in lines) > MAX_KEPT_BYTES
        assert (notice["logger"], notice["level"], notice["dropped"]) == ("proxy.logs", "WARNING", dropped)
        logs.access_line({"id": "after"})
        assert [line["id"] for line in read_all(reader)] == ["after"]
        assert logs.count_lost_lines().dropped == dropped


def test_no_line_is_dropped_after_the_pipe_was_read() -> None:
    with pipe() as (reader, stream):
        writer = LineWriter(stream.fileno(), max_kept_bytes=100)
        while not writer.dropped_lines:
            writer.write(b"x" * 99 + b"\n")
        while read(reader):
            pass
        assert writer.write(b"y" * 99 + b"\n")
        assert read(reader).endswith(b"xx\n" + b"y" * 99 + b"\n")
        assert writer.dropped_lines == 1
        writer.close()


def test_notice_of_dropped_lines_has_no_request_id() -> None:
    with pipe() as (reader, stream):
        logs.set_up_logging(Log(format="json"), stream)
        token = logs.request_id.set("r-42")
        try:
            while not logs.count_lost_lines().dropped:
                logger.info("x" * 1000, extra=logs.ALWAYS)
            *lines, notice = read_all(reader)
        finally:
            logs.request_id.reset(token)
    assert {line["id"] for line in lines} == {"r-42"}
    assert "id" not in notice


@pytest.mark.parametrize("piece", [1000, 4096, 65536])
def test_lines_longer_than_a_pipe_stay_whole(piece: int) -> None:
    lines = [bytes([letter]) * 150_000 + b"\n" for letter in b"abcd"]
    with pipe() as (reader, stream):
        writer = LineWriter(stream.fileno())
        received = b""
        for line in lines:
            assert not writer.write(line)
            received += read(reader, piece)
        while not writer.flush_kept():
            received += read(reader, piece)
        while more := read(reader):
            received += more
        writer.close()
    assert received == b"".join(lines)
    assert writer.dropped_lines == 0


def test_lines_of_several_processes_do_not_mix() -> None:
    code = """if True:
        import logging, sys
        from proxy.observe import logs
        from proxy.settings import Log
        logs.set_up_logging(Log(format="json"))
        for number in range(3000):
            logs.access_line({"id": f"{sys.argv[1]}-{number}", "padding": sys.argv[1] * (number % 3500)})
    """
    reader, writer = os.pipe()
    processes = [subprocess.Popen([sys.executable, "-c", code, letter], stdout=writer) for letter in "abc"]
    os.close(writer)
    received = b""
    while piece := os.read(reader, 4096):
        received += piece
    os.close(reader)
    assert [process.wait() for process in processes] == [0, 0, 0]
    ids = [line["id"] for line in map(json.loads, received.splitlines())]
    assert {name[0] for name in ids} == {"a", "b", "c"}
    assert len(set(ids)) == len(ids)


def test_returning_reader_gets_the_number_of_dropped_lines(tmp_path: Path) -> None:
    path = tmp_path / "log"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    with open(path, "w") as stream:
        logs.set_up_logging(Log(format="json"), stream)
        logger.info("read")
        assert [line["message"] for line in read_all(reader)] == ["read"]
        os.close(reader)
        for _ in range(3):
            logger.info("lost")
        logs.flush()
        assert logs.count_lost_lines().dropped == 3
        reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        logger.info("read again")
        first, second = read_all(reader)
        assert first["message"] == "read again"
        assert second["dropped"] == 3
        os.close(reader)


def test_pipe_that_cannot_be_reopened_is_polled_before_each_write(tmp_path: Path) -> None:
    path = tmp_path / "log"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    with open(path, "w") as stream:
        os.close(reader)  # the kernel refuses to open a pipe without a reader
        logs.set_up_logging(Log(format="json"), stream)
        logger.info("lost")
        reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        for number in range(3000):
            logs.access_line({"id": number, **dict.fromkeys(map(str, range(number % 50)), "x" * 2000)})
        dropped = logs.count_lost_lines().dropped
        lines = [line for line in read_all(reader) if "id" in line]
        assert len(lines) == 3001 - dropped
        assert os.get_blocking(stream.fileno())
        os.close(reader)


def test_unread_socket_never_blocks_the_writer() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs, ours.makefile("w") as stream:
        theirs.setblocking(False)
        logs.set_up_logging(Log(format="json"), stream)
        for number in range(10_000):
            logs.access_line({"id": number, "padding": "x" * 500})
        assert os.get_blocking(ours.fileno())
        dropped = logs.count_lost_lines().dropped
        *lines, notice = read_all(theirs.fileno())
        assert [line["id"] for line in lines] == list(range(10_000 - dropped))
        assert notice["dropped"] == dropped
        theirs.close()
        logger.info("lost")
        assert logs.count_lost_lines().dropped == dropped + 1


def test_full_disk_only_drops_lines() -> None:
    with open("/dev/full", "w") as stream:
        logs.set_up_logging(Log(format="json"), stream)
        for _ in range(5):
            logger.info("lost")
            logs.flush()
        assert logs.count_lost_lines().dropped == 5


def test_partly_written_line_is_finished_before_the_next(tmp_path: Path) -> None:
    path = tmp_path / "log"
    code = """if True:
        import resource
        from proxy.observe.logs.lines import LineWriter
        _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (25, hard))
        writer = LineWriter(1)
        for line in (b"the first line\\n", b"the second line\\n", b"the third line\\n"):
            writer.write(line)
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
        writer.write(b"the fourth line\\n")
        raise SystemExit(writer.dropped_lines)
    """
    with open(path, "w") as stream:
        dropped = subprocess.run([sys.executable, "-c", code], stdout=stream, check=False).returncode
    assert path.read_text() == "the first line\nthe second line\nthe fourth line\n"
    assert dropped == 1


@pytest.mark.parametrize(("closed", "is_logged"), [((1,), True), ((1, 2), False)])
def test_log_goes_to_stderr_without_stdout(closed: tuple[int, ...], is_logged: bool) -> None:
    code = """if True:
        import logging
        from proxy.observe import logs
        from proxy.settings import Log
        logs.set_up_logging(Log())
        logging.getLogger("proxy.somewhere").info("hello")
        logs.flush()
    """

    def close() -> None:
        for fd in closed:
            os.close(fd)

    done = subprocess.run(
        [sys.executable, "-c", code],
        preexec_fn=close,
        stderr=subprocess.PIPE,
        check=True,
    )
    assert (b"hello" in done.stderr) == is_logged


def test_forked_process_does_not_write_kept_lines_of_its_parent() -> None:
    with pipe() as (reader, stream):
        fcntl.fcntl(reader, fcntl.F_SETPIPE_SZ, 4096)
        logs.set_up_logging(Log(format="json"), stream)
        for number in range(20):
            logs.access_line({"id": number, "padding": "x" * 500})
        pid = os.fork()
        if pid == 0:
            logs.set_up_logging(Log(format="json"), stream)
            logs.access_line({"id": "the child's", "padding": "x" * 4000})
            os._exit(logs.count_lost_lines().dropped)
        _, status = os.waitpid(pid, 0)
        assert status == 0
        assert [line["id"] for line in read_all(reader)] == list(range(20))
