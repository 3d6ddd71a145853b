"""Claude Code, Codex and opencode with default settings, without a terminal.

They read a PDF, a text and a picture, edit the text and report it, while one of two decoders is killed. No request may
fail. The model follows a script in the prompt (`proxy/sim/model/writer.py`).
"""

from __future__ import annotations

import json
import re
import shutil
import struct
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from lab.common.fleet import Gateway
from lab.common.peers import Environment, run
from lab.common.processes import HOST, fetch, finished

_ENVIRONMENT: Final = Environment(".venv-clients")
NODE: Final = _ENVIRONMENT.directory / "node"
_WHEELS: Final = (
    *("anthropic==2.12.0", "openai==3.54.0", "openai-agents==0.24.0", "litellm==1.83.0"),
    "langchain-anthropic==1.7.7",
)
_PACKAGES: Final = (
    *("@anthropic-ai/sdk@1.12.0", "openai@6.49.0", "ai@6.0.326", "@ai-sdk/anthropic@3.0.139", "@ai-sdk/openai@3.0.141"),
    *("@anthropic-ai/claude-code@2.1.332", "@openai/codex@0.171.0", "opencode-ai@1.18.33"),
)
_PROGRAMS: Final = Path(__file__).with_name("programs")
_HELPERS: Final = ("__init__", "part")
_PATIENCE_SECONDS: Final = 120.0


def provide() -> bool:
    """Install everything. Return False if pip or npm fails, which prints the reason."""
    if not _ENVIRONMENT.provide(_WHEELS):
        return False
    installed, wanted = NODE / "packages.txt", "\n".join(_PACKAGES)
    if installed.exists() and installed.read_text() == wanted:
        return True
    NODE.mkdir(exist_ok=True)
    npm = ("npm", "install", "--prefix", str(NODE), "--no-audit", "--no-fund", "--loglevel", "error")
    if is_success := run(*npm, *_PACKAGES):
        installed.write_text(wanted)
    return is_success


def names() -> list[str]:
    """Return the names of the programs."""
    files = sorted(_PROGRAMS.glob("*.py")) + sorted(_PROGRAMS.glob("*.mjs"))
    return [file.name for file in files if file.stem not in _HELPERS]


def ran(name: str, port: int) -> tuple[bool, str]:
    """Run a program against the gateway on this port. Return whether it succeeded, and its last output."""
    if name.endswith(".mjs"):
        for file in _PROGRAMS.glob("*.mjs"):
            shutil.copy(file, NODE)  # modules find packages beside them
        command = ["node", str(NODE / name)]
    else:
        command = [
            str(_ENVIRONMENT.python),
            "-W",
            "ignore",
            "-m",
            f"lab.client_tools.programs.{name.removesuffix('.py')}",
        ]
    done = finished([*command, str(port)], _PATIENCE_SECONDS)
    lines = done.stdout.strip().splitlines() or ["nothing"]
    return done.returncode == 0, lines[-1] if done.returncode == 0 else "\n".join(lines[-12:])


Call = dict[str, Any]

_OLD, _NEW, _END = "hello old world\n", "hello new world\n", "Done: the note is new."
_AGENT_SECONDS: Final = 120.0
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
    """The model's tool calls in a directory, one per turn: read paper.pdf, note.txt and picture.png; edit the note."""
    words: Callable[[str], list[str]]
    """Returns the command line for a prompt."""
    environment: Callable[[int], dict[str, str]]
    """Returns environment variables for a port."""
    home: Callable[[int], dict[str, str]]
    """Returns files of its home directory for a port."""
    reads_prompt: bool = False
    """The agent reads the prompt on its standard input."""

    def run(self, gateway: Gateway, directory: Path) -> tuple[bool, str]:
        """Run the agent against a gateway. Return whether it succeeded, and a summary."""
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
            self.words(prompt), _AGENT_SECONDS, environment, at=work, given=prompt if self.reads_prompt else ""
        )
        note, resumed, rejected = (
            (work / "note.txt").read_text(),
            gateway.figure("resumes_total"),
            _failed_requests(gateway),
        )
        is_success = done.returncode == 0 and note == _NEW and _END in done.stdout and resumed > 0 and not rejected
        if is_success:
            summary = "read a PDF, a text and a picture, and edited the text, while a decoder was killed"
            return True, f"{summary}; resumed answers: {resumed:g}"
        summary = f"exit {done.returncode}, note {note!r}, resumed {resumed}, rejected {rejected}"
        return False, f"{summary}\n{done.stdout[-2000:]}"


def _kill_one_decoder(gateway: Gateway) -> None:
    instances = json.loads(fetch(gateway.url + "/instances"))["instances"]
    decoder = next(each for each in instances if each["role"] == "decode")
    fault = json.dumps({"action": "kill", "tokens": _KILLED_AFTER_TOKENS}).encode()
    fetch(f"http://{decoder['address']}/_mock/faults", fault)


def _failed_requests(gateway: Gateway) -> list[str]:
    """Return API and status of requests that were answered with an error."""
    metrics = gateway.metrics()
    found = re.findall(r'^pdproxy_requests_total\{api="(\w+)",code="([45]\d\d)"\} (\S+)$', metrics, re.MULTILINE)
    return [f"{api} {code}" for api, code, count in found if float(count) and code != "499"]


# Files


def _png() -> bytes:
    """Return a PNG of a red square."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    side = 16
    rows = b"".join(b"\0" + bytes((200, 30, 30)) * side for _ in range(side))
    head = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


def _pdf(text: str) -> bytes:
    """Return a PDF of one page with a line of text."""
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
    """Return the call of a model that writes programs instead of calling Codex's tools one by one."""
    run = f"const done = await tools.exec_command({{cmd: {json.dumps(command)}}}); text(done.output);"
    return _tool("functions__exec", input=run)


def _codex(model: str, calls: Callable[[Path], Sequence[Call]]) -> CodingAgent:
    """Return Codex with a model that it knows. A built-in table sets the tools and features of models."""
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
