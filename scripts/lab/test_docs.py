"""Run the commands of README.md and docs/ from top to bottom in a copy of the tree.

Servers keep running, as in separate terminals, and stop at the end. They listen on loopback only, and each command has
a deadline.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

import yaml

from lab.common.output import aligned
from lab.common.proc import tree
from lab.common.processes import unwind_on_signals

_INDENT = "    "
_fence = re.compile(r"( *)```(\w*)").match
_is_item = re.compile(r"([-*]|\d+\.) ").match
# Languages of fenced blocks with commands. Other languages are examples.
_SHELLS = ("", "bash", "sh")
_note = re.compile(r"<!-- *(not run|output of|file)(?:: *(.*?))? *-->").fullmatch
_is_command = re.compile(r"(?:[A-Z_]+=\S* )*(?:pdproxy|curl|pip|python3|scripts/[\w-]+)(?: .*)?").fullmatch
_NUMBER = re.compile(r"(?<![\w.-])(?:\d[\d,.]*|-)(?![\w-])(?: (?:ms|s|%)(?!\w))?|(?<=[ ,(])\d[\d,.]*(?=[%×/x])")
_ADDRESS = re.compile(r"[\w.-]+:\d{2,5}\b")


class PageError(Exception):
    """A page cannot be followed. The text says where, and how to fix it."""


class Kind(Enum):
    """The kind of a block."""

    COMMANDS = "commands"
    NOT_RUN = "not run"
    OUTPUT = "output of"
    FILE = "file"
    EXAMPLE = "example"
    PICTURE = "picture"


@dataclass(frozen=True)
class Block:
    """A block of a page."""

    place: str
    """Place of its first line, as in `README.md:12`."""
    kind: Kind
    note_text: str
    """Text of its note: the reason, the command of the output, or the name of the file."""
    text: str
    """Content without its indentation."""
    language: str = ""
    """Language of a fenced block."""

    @property
    def commands(self) -> list[str]:
        """Commands, one per line and its continuation lines."""
        return _joined(self.text)


def blocks(name: str, text: str) -> list[Block]:
    """Return the blocks of a page, indented or fenced, in order. Raises PageError for an unknown kind."""
    found = _raw(text.splitlines())
    return [_block(f"{name}:{number}", note, lines, language) for number, note, lines, language in found]


def without_comment(command: str) -> str:
    """Return a command without its comment."""
    return re.sub(r"\s+#.*$", "", command, flags=re.MULTILINE).strip()


def normalized(line: str) -> str:
    """Return a line with placeholders for numbers and addresses, and single spaces."""
    return re.sub(r"\s+", " ", _NUMBER.sub("N", _ADDRESS.sub("A", line))).strip()


def missing_lines(output: str, shown: str) -> list[str]:
    """Return the lines of an output that a page shows in no similar form."""
    known = {normalized(line) for line in shown.splitlines()}
    return [line for line in output.splitlines() if line.strip() and normalized(line) not in known]


def _block(place: str, note: re.Match[str] | None, lines: list[str], language: str) -> Block:
    text = "\n".join(lines)
    if note is not None:
        kind, note_text = Kind(note[1]), note[2] or ""
        if not note_text:
            raise PageError(f"{place}: the note before it has no text after `{kind.value}`")
        return Block(place, kind, note_text, text, language)
    if language not in _SHELLS:
        return Block(place, Kind.PICTURE if language == "mermaid" else Kind.EXAMPLE, "", text, language)
    if "│" in text:
        return Block(place, Kind.PICTURE, "", text, language)
    if odd := [command for command in _joined(text) if not _is_command(command.partition("\n")[0])]:
        raise PageError(f"{place}: is `{odd[0]}` a command? If not, add a note; see scripts/test-docs")
    return Block(place, Kind.COMMANDS, "", text, language)


def _joined(text: str) -> list[str]:
    """Return the commands, each with its continuation lines."""
    return [line.replace("\0", "\\\n") for line in text.replace("\\\n", "\0").splitlines() if line.strip()]


def _raw(lines: list[str]) -> Iterator[tuple[int, re.Match[str] | None, list[str], str]]:
    """Yield the number of the first line, the preceding note, the lines and the language of each block."""
    note: re.Match[str] | None = None
    at = 0
    in_list = False  # where indented lines are paragraphs of an item
    while at < len(lines):
        line = lines[at]
        if fence := _fence(line):
            end = next(number for number in range(at + 1, len(lines)) if lines[number] == f"{fence[1]}```")
            yield at + 2, note, [found.removeprefix(fence[1]) for found in lines[at + 1 : end]], fence[2]
            at, note = end + 1, None
        elif line.startswith(_INDENT) and not in_list and not (lines[at - 1].strip() and _note(lines[at - 1]) is None):
            end = at
            while end < len(lines) and (lines[end].startswith(_INDENT) or not lines[end].strip()):
                end += 1
            found = [line.removeprefix(_INDENT) for line in lines[at:end]]
            while not found[-1].strip():
                found.pop()
            yield at + 1, note, found, ""
            at, note = end, None
        else:
            if line.strip():
                note = _note(line.strip())
            if line.strip() and not line.startswith(" "):
                in_list = _is_item(line) is not None or (in_list and bool(lines[at - 1].strip()))
            at += 1


ROOT = Path(__file__).parents[2]
PAGES = ("README.md", *(str(path.relative_to(ROOT)) for path in sorted((ROOT / "docs").rglob("*.md"))))
# The file that docs/ calls the reader's: one for README.md's first engines.
MY_YAML = "prefill: [localhost:7100]\ndecode: [localhost:7200]\n"

_DEADLINE_SECONDS = 180.0  # of which pip takes most
_SERVING_SECONDS = 60.0
_STOP_SECONDS = 10.0
_LOOKS_SECONDS = 3.0
_serves = re.compile(r"^pdproxy (?:mock-engine |--)").match
_is_up = re.compile(r"^simulated .* on http://|ready: http://", re.MULTILINE).search
_goes_on = re.compile(r"^pdproxy top (?!.*--once)").match
_error_body = re.compile(r'^\s*\{"error":', re.MULTILINE).search


@dataclass
class Walk:
    """A reader's progress through the pages."""

    home: Path
    """Directory of the tree, and of files that commands write."""
    stack: ExitStack
    results: list[Sequence[str]] = field(default_factory=list)
    """Place, command, seconds and failure of each command."""
    left_out: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    outputs: dict[str, str] = field(default_factory=dict)
    """Outputs by command."""

    @property
    def tree(self) -> Path:
        return self.home / "pdproxy-tree"

    def environment(self) -> dict[str, str]:
        """Return a new user's environment with .venv on the path, as README.md says."""
        kept = {
            name: value for name, value in os.environ.items() if not name.startswith(("PROXY_", "OTEL_", "OPENAI_"))
        }
        for name in ("PYTHONPATH", "VIRTUAL_ENV", "CALLED_FROM"):
            kept.pop(name, None)
        path = f"{self.tree / '.venv' / 'bin'}:{kept['PATH']}"
        return {**kept, "HOME": str(self.home), "PATH": path, "PROXY_DRAIN__NOT_READY_SECONDS": "0"}

    def read(self, block: Block) -> None:
        """Process a block."""
        match block.kind:
            case Kind.COMMANDS:
                for command in block.commands:
                    self.run(block.place, command)
            case Kind.NOT_RUN:
                first = without_comment(block.text).partition("\n")[0].removesuffix("\\").strip()
                self.left_out.append(f"{block.place}: {first}  ({block.note_text})")
            case Kind.OUTPUT:
                self.compare(block)
            case Kind.FILE:
                yaml.safe_load(block.text)
                (self.tree / block.note_text).write_text(block.text + "\n")
            case Kind.EXAMPLE | Kind.PICTURE:
                pass

    def run(self, place: str, command: str) -> None:
        """Run a command to its end, or until it serves."""
        name = without_comment(command)
        if "…" in name:
            self.left_out.append(f"{place}: {name}  (… stands for the reader's value)")
            return
        began = time.monotonic()
        problem = self.serve(name.removesuffix("&").strip()) if _serves(name) else self.finish(name)
        seconds = f"{time.monotonic() - began:.1f}"
        self.results.append((place, name.partition("\n")[0][:90], seconds, "failed" if problem else ""))
        print(f"{place}: {name}  {seconds} s{'  FAILED' if problem else ''}", flush=True)
        if problem:
            self.problems.append(f"{place}: {name}\n{problem}")

    def serve(self, command: str) -> str | None:
        """Start a server and leave it running. Return its output if it fails."""
        log = self.home / f"server-{len(self.results)}.log"
        with log.open("wb") as output:
            process = self.start(command, output.fileno())
        self.stack.callback(_stop, process)
        deadline = time.monotonic() + _SERVING_SECONDS
        while not _is_up(log.read_text(errors="replace")):
            if process.poll() is not None or time.monotonic() > deadline:
                return log.read_text(errors="replace")
            time.sleep(0.05)
        return None

    def finish(self, command: str) -> str | None:
        """Run a command to its end. Return the problem, or None."""
        process = self.start(command, subprocess.PIPE)
        goes_on = _goes_on(command) is not None
        try:
            output, _ = process.communicate(timeout=_LOOKS_SECONDS if goes_on else _DEADLINE_SECONDS)
        except subprocess.TimeoutExpired:
            # A reader presses Ctrl-C for a command that continues or hangs.
            os.killpg(process.pid, signal.SIGINT)
            try:
                output, _ = process.communicate(timeout=_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                _stop(process)
                output, _ = process.communicate()
            if not goes_on:
                return f"it did not end within {_DEADLINE_SECONDS:g} s; it printed:\n{output}"
        self.outputs[command] = output
        if process.returncode and not (goes_on and process.returncode in (-signal.SIGINT, 130)):
            return f"exit code {process.returncode}; it printed:\n{output}"
        return f"it printed:\n{output}" if command.startswith("curl") and _error_body(output) else None

    def start(self, command: str, output: int) -> subprocess.Popen[str]:
        """Start a command in the reader's shell. Later commands see its exported variables."""
        shell = f"[ ! -e ~/.session ] || . ~/.session\n{command}\ncode=$?; export -p >~/.session; exit $code"
        return subprocess.Popen(
            ["bash", "-c", shell],
            cwd=self.tree,
            env=self.environment(),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def compare(self, block: Block) -> None:
        """Compare an output with the page."""
        output = self.outputs.get(block.note_text)
        if output is None:
            self.problems.append(f"{block.place}: `{block.note_text}` was not run before this output")
        elif lines := missing_lines(output, block.text):
            self.problems.append(
                "\n".join((f"{block.place}: `{block.note_text}` prints lines that the page does not show:", *lines))
            )


def main() -> None:
    """Follow the pages, and print the results."""
    unwind_on_signals()
    began = time.monotonic()
    with ExitStack() as stack:
        home = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pdproxy-docs-")))
        walk = Walk(home, stack)
        _copy(walk.tree)
        (walk.tree / "my.yaml").write_text(MY_YAML)
        try:
            pages = [blocks(name, (ROOT / name).read_text(encoding="utf-8")) for name in PAGES]
        except PageError as error:
            sys.exit(str(error))
        for block in (block for page in pages for block in page):
            walk.read(block)
    print("\n" + aligned([("place", "command", "s", ""), *walk.results]))
    print("\nnot run:\n  " + "\n  ".join(walk.left_out))
    for problem in walk.problems:
        print(f"\n{problem}")
    seconds = time.monotonic() - began
    print(
        f"\n{len(walk.results)} commands in {seconds:.0f} s, {len(walk.left_out)} not run, "
        f"{len(walk.problems)} problems"
    )
    sys.exit(bool(walk.problems))


def _copy(tree: Path) -> None:
    """Copy the files that git knows, with their present content."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    for name in listed.stdout.decode().split("\0"):
        source = ROOT / name
        if name and source.is_file():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, tree / name)


def _stop(process: subprocess.Popen[str]) -> None:
    """Stop a process and its descendants."""
    if process.poll() is None:
        pids = tree(process.pid)
        for pid in pids:
            _signal(pid, signal.SIGTERM)
        try:
            process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            for pid in pids:
                _signal(pid, signal.SIGKILL)
            process.wait()


def _signal(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


if __name__ == "__main__":
    main()
