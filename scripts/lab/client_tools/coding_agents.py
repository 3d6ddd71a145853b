"""Claude Code and Codex, run without a terminal: they read a file, edit it and say that it is done, and one of the two
decoders is killed while it answers. The model plays a part that the prompt has (`proxy/sim/model/script.py`).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final
from urllib.request import ProxyHandler, Request, build_opener

from lab.client_tools import installed
from lab.common.gateways import figure
from lab.common.processes import HOST, finished

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

_OLD, _NEW, _END = "hello old world\n", "hello new world\n", "Done: the note is new."
_PATIENCE_SECONDS: Final = 120.0
_KILLED_AFTER_TOKENS: Final = 25
_open: Final = build_opener(ProxyHandler({})).open  # without http_proxy
_CODEX: Final = """
model = "gpt-5"
model_provider = "pdproxy"
web_search = "disabled"
[model_providers.pdproxy]
name = "pdproxy"
base_url = "http://{host}:{port}/v1"
wire_api = "responses"
env_key = "PDPROXY_KEY"
"""


@dataclass(frozen=True, slots=True)
class CodingAgent:
    """`calls`: how it reads and edits a file; `words`: its command line, for a prompt; `home`: what is in its home for
    a port.
    """

    name: str
    calls: Callable[[Path], tuple[dict[str, Any], dict[str, Any]]]
    words: Callable[[str], list[str]]
    environment: Callable[[int], dict[str, str]]
    home: Callable[[int], dict[str, str]]

    def run(self, port: int, directory: Path) -> tuple[bool, str]:
        """Against the gateway on this port: whether it went well, and what is to be told of it."""
        home, work = directory / "home", directory / "work"
        for path, text in {**self.home(port), "../work/note.txt": _OLD}.items():
            (home / path).parent.mkdir(parents=True, exist_ok=True)
            (home / path).write_text(text)
        read, edit = self.calls(work / "note.txt")
        turns = [{"say": "I read it.", "calls": [read]}, {"say": "I edit it.", "calls": [edit]}, {"say": _END}]
        _kill_one_decoder(port)
        environment = {"HOME": str(home), **self.environment(port)}
        done = finished(self.words(f"play: {json.dumps(turns)}"), _PATIENCE_SECONDS, environment, at=work)
        note, continued = (work / "note.txt").read_text(), _continued(port)
        is_well = done.returncode == 0 and note == _NEW and _END in done.stdout and continued > 0
        if is_well:
            return (
                True,
                f"read a file, edited it and said so, while a decoder was killed; answers continued: {continued}",
            )
        return False, f"exit {done.returncode}, note {note!r}, continued {continued}\n{done.stdout[-2000:]}"


def _kill_one_decoder(port: int) -> None:
    with _open(f"http://{HOST}:{port}/instances") as answer:
        decoder = next(each for each in json.load(answer)["instances"] if each["role"] == "decode")
    fault = json.dumps({"action": "kill", "tokens": _KILLED_AFTER_TOKENS}).encode()
    _open(Request(f"http://{decoder['address']}/_mock/faults", fault, {"Content-Type": "application/json"})).close()


def _continued(port: int) -> int:
    return int(max(0.0, figure(port, "resumes_total")))


def _tool(name: str, **arguments: str) -> dict[str, Any]:
    return {"name": name, "arguments": arguments}


CODING_AGENTS: Final = (
    CodingAgent(
        "Claude Code",
        lambda note: (
            _tool("Read", file_path=str(note)),
            _tool("Edit", file_path=str(note), old_string="old", new_string="new"),
        ),
        lambda prompt: [
            *(str(installed.NODE / "node_modules/.bin/claude"), "-p", prompt),
            *("--permission-mode", "acceptEdits", "--allowedTools", "Read,Edit"),
        ],
        lambda port: {
            "ANTHROPIC_BASE_URL": f"http://{HOST}:{port}",
            "ANTHROPIC_AUTH_TOKEN": "any",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        },
        lambda port: {},
    ),
    CodingAgent(
        "Codex",
        lambda note: (
            _tool("exec_command", cmd=f"cat {note}"),
            _tool("exec_command", cmd=f"sed -i s/old/new/ {note}"),
        ),
        lambda prompt: [
            *(str(installed.NODE / "node_modules/.bin/codex"), "exec", "--skip-git-repo-check"),
            *("--dangerously-bypass-approvals-and-sandbox", prompt),
        ],
        lambda port: {"PDPROXY_KEY": "any"},
        lambda port: {".codex/config.toml": _CODEX.format(host=HOST, port=port)},
    ),
)
