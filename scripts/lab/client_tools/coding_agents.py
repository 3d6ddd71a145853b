"""Claude Code, Codex and opencode in their default configuration, run without a terminal: they read a PDF, a text and a
picture, edit the text and say that it is done, and one of the two decoders is killed while it answers.

No request may fail. The model plays a part that the prompt has (`proxy/sim/model/script.py`).
"""

from __future__ import annotations

import json
import re
import struct
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from lab.client_tools.libraries import NODE
from lab.common.fleet import Gateway
from lab.common.processes import HOST, fetch, finished

Call = dict[str, Any]

_OLD, _NEW, _END = "hello old world\n", "hello new world\n", "Done: the note is new."
_PATIENCE_SECONDS: Final = 120.0
_KILLED_AFTER_TOKENS: Final = 25
_CODEX: Final = """
model = "{model}"
model_provider = "pdproxy"
[model_providers.pdproxy]
name = "pdproxy"
base_url = "http://{host}:{port}/v1"
wire_api = "responses"
env_key = "PDPROXY_KEY"
"""


@dataclass(frozen=True, slots=True)
class CodingAgent:
    """A program, and how it is used."""

    name: str
    calls: Callable[[Path], Sequence[Call]]
    """The model's calls, one for each turn, by which it reads paper.pdf, note.txt and picture.png, and edits the note,
    in a directory.
    """
    words: Callable[[str], list[str]]
    """Its command line, for a prompt."""
    environment: Callable[[int], dict[str, str]]
    """For a port."""
    home: Callable[[int], dict[str, str]]
    """Files in its home, for a port."""
    reads_prompt: bool = False
    """It is given the prompt on its standard input."""

    def run(self, gateway: Gateway, directory: Path) -> tuple[bool, str]:
        """Against a gateway: whether it went well, and what is to be told of it."""
        port = gateway.port
        home, work = directory / "home", directory / "work"
        for path, text in {**self.home(port), "../work/note.txt": _OLD}.items():
            (home / path).parent.mkdir(parents=True, exist_ok=True)
            (home / path).write_text(text)
        (work / "paper.pdf").write_bytes(_pdf("Grass is green."))
        (work / "picture.png").write_bytes(_png())
        calls = self.calls(work)
        turns = [*({"say": f"Turn {at}.", "calls": [call]} for at, call in enumerate(calls)), {"say": _END}]
        _kill_one_decoder(gateway)
        prompt = f"play: {json.dumps(turns)}"
        environment = {"HOME": str(home), "PWD": str(work), **self.environment(port)}
        done = finished(
            self.words(prompt), _PATIENCE_SECONDS, environment, at=work, given=prompt if self.reads_prompt else ""
        )
        note, continued, refused = (work / "note.txt").read_text(), gateway.figure("resumes_total"), _refused(gateway)
        is_well = done.returncode == 0 and note == _NEW and _END in done.stdout and continued > 0 and not refused
        if is_well:
            told = "read a PDF, a text and a picture, edited the text and said so, while a decoder was killed"
            return True, f"{told}; answers continued: {continued:g}"
        told = f"exit {done.returncode}, note {note!r}, continued {continued}, refused {refused}"
        return False, f"{told}\n{done.stdout[-2000:]}"


def _kill_one_decoder(gateway: Gateway) -> None:
    instances = json.loads(fetch(gateway.url + "/instances"))["instances"]
    decoder = next(each for each in instances if each["role"] == "decode")
    fault = json.dumps({"action": "kill", "tokens": _KILLED_AFTER_TOKENS}).encode()
    fetch(f"http://{decoder['address']}/_mock/faults", fault)


def _refused(gateway: Gateway) -> list[str]:
    """The APIs and statuses of requests that were answered with an error."""
    told = gateway.metrics()
    found = re.findall(r'^pdproxy_requests_total\{api="(\w+)",code="([45]\d\d)"\} (\S+)$', told, re.MULTILINE)
    return [f"{api} {code}" for api, code, count in found if float(count) and code != "499"]


# Files


def _png() -> bytes:
    """A red square."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    side = 16
    rows = b"".join(b"\0" + bytes((200, 30, 30)) * side for _ in range(side))
    head = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


def _pdf(text: str) -> bytes:
    """One page with a line of text."""
    drawn = b"BT /F1 24 Tf 72 720 Td (%b) Tj ET" % text.encode()
    objects = (
        b"<</Type/Catalog/Pages 2 0 R>>",
        b"<</Type/Pages/Kids[3 0 R]/Count 1>>",
        b"<</Type/Page/Parent 2 0 R/MediaBox[0 0 612 792]/Contents 4 0 R/Resources<</Font<</F1 5 0 R>>>>>>",
        b"<</Length %d>>stream\n%b\nendstream" % (len(drawn), drawn),
        b"<</Type/Font/Subtype/Type1/BaseFont/Helvetica>>",
    )
    written, places = b"%PDF-1.4\n", b"0000000000 65535 f \n"
    for number, each in enumerate(objects, 1):
        places += b"%010d 00000 n \n" % len(written)
        written += b"%d 0 obj\n%b\nendobj\n" % (number, each)
    count = len(objects) + 1
    table = b"xref\n0 %d\n%btrailer<</Size %d/Root 1 0 R>>\nstartxref\n%d\n%%%%EOF\n"
    return written + table % (count, places, count, len(written))


# The agents


def _tool(name: str, **arguments: str) -> Call:
    return {"name": name, "arguments": arguments}


def _program(name: str) -> str:
    return str(NODE / "node_modules/.bin" / name)


def _script(command: str) -> Call:
    """Codex has some models write programs instead of calling its tools one by one."""
    run = f"const done = await tools.exec_command({{cmd: {json.dumps(command)}}}); text(done.output);"
    return _tool("functions__exec", input=run)


def _codex(model: str, calls: Callable[[Path], Sequence[Call]]) -> CodingAgent:
    """With a model that it knows, whose tools and features it takes from a table of its own."""
    return CodingAgent(
        f"Codex with {model}",
        calls,
        lambda prompt: [
            *(_program("codex"), "exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"),
            prompt,
        ],
        lambda port: {"PDPROXY_KEY": "any"},
        lambda port: {".codex/config.toml": _CODEX.format(model=model, host=HOST, port=port)},
    )


def _opencode(port: int) -> str:
    options = {"baseURL": f"http://{HOST}:{port}/v1", "apiKey": "any"}
    return json.dumps({"model": "anthropic/claude-sonnet-4-5", "provider": {"anthropic": {"options": options}}})


CODING_AGENTS: Final = (
    CodingAgent(
        "Claude Code",
        lambda work: (
            _tool("Read", file_path=str(work / "paper.pdf")),
            _tool("Read", file_path=str(work / "note.txt")),
            _tool("Read", file_path=str(work / "picture.png")),
            _tool("Edit", file_path=str(work / "note.txt"), old_string="old", new_string="new"),
        ),
        lambda prompt: [
            *(_program("claude"), "-p", prompt),
            *("--permission-mode", "acceptEdits", "--allowedTools", "Read,Edit"),
        ],
        lambda port: {
            "ANTHROPIC_BASE_URL": f"http://{HOST}:{port}",
            "ANTHROPIC_AUTH_TOKEN": "any",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        },
        lambda port: {},
    ),
    _codex(
        "gpt-5.5",
        lambda work: (
            _tool("exec_command", cmd=f"cat {work / 'paper.pdf'}"),
            _tool("tool_search", query="calendar"),
            _tool("view_image", path=str(work / "picture.png")),
            _tool("exec_command", cmd=f"sed -i s/old/new/ {work / 'note.txt'}"),
        ),
    ),
    _codex(
        "gpt-6.2-sol",
        lambda work: (
            _script(f"cat {work / 'paper.pdf'}"),
            _script(f"cat {work / 'note.txt'}"),
            _tool(
                "functions__exec",
                input=f"image(await tools.view_image({{path: {json.dumps(str(work / 'picture.png'))}}}));",
            ),
            _script(f"sed -i s/old/new/ {work / 'note.txt'}"),
        ),
    ),
    CodingAgent(
        "opencode",
        lambda work: (
            _tool("read", filePath=str(work / "paper.pdf")),
            _tool("read", filePath=str(work / "note.txt")),
            _tool("read", filePath=str(work / "picture.png")),
            _tool("edit", filePath=str(work / "note.txt"), oldString="old", newString="new"),
        ),
        lambda prompt: [_program("opencode"), "run"],
        lambda port: {},
        lambda port: {".config/opencode/opencode.json": _opencode(port)},
        reads_prompt=True,
    ),
)
