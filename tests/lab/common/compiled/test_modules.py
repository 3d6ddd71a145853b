"""Modules of a plain request and its tokens are compiled, except those that mypyc cannot compile."""

from __future__ import annotations

import ast
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from lab.common.compiled.modules import MODULES
from proxy.wire.openai import Api
from tests.asking import request
from tests.conftest import Deploy
from tests.gateway.calls import BATCH, SWEEP, Calls, Ended, ask, connected, counting
from tests.talking import raw

REQUESTS: Final = 40
STREAMS: Final = 20
NOT_COMPILED: Final = {
    "proxy/listener/drain.py": "aiohttp sets an attribute of its middleware, which a compiled function does not have",
    "proxy/listener/replies.py": "aiohttp sets an attribute of its middleware, which a compiled function does not have",
    "proxy/observe/instruments.py": "its classes have bases in prometheus-client, which is not compiled",
}
"""Modules on the path of a plain request that mypyc cannot compile, with the reason."""


def interpreted(calls: Calls, count: int) -> Iterator[str]:
    """Name the functions that are not compiled and were called for at least every second of `count` events."""
    root = f"{Path.cwd()}/"
    for function, number in sorted(calls.functions.items(), key=lambda item: item[0].co_filename):
        module = function.co_filename.removeprefix(root)
        if number >= count / 2 and module not in MODULES and module not in NOT_COMPILED:
            yield f"{module}: {function.co_qualname}"


@pytest.mark.parametrize("path", MODULES)
def test_compiled_module_lists_no_slots_that_mypyc_ignores(path: str) -> None:
    assert "__slots__ =" not in Path(path).read_text()


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("connector", ["vllm_pull", "sglang_bootstrap"])
async def test_plain_request_runs_through_compiled_modules(
    deploy: Deploy, caplog: pytest.LogCaptureFixture, connector: str, stream: bool
) -> None:
    caplog.set_level(logging.WARNING, "proxy")  # the handler of the tests would write the lines
    gateway = await deploy(connector=connector, decoder={"decode_step_ms": 1.0})
    observers, ended = gateway.worker.request_observers, Ended()
    observers.add_listener(ended)
    async with connected(gateway, 1) as lines:
        await ask(lines, 2, stream=stream, max_tokens=16)
        with counting() as calls:
            await ask(lines, REQUESTS, stream=stream, max_tokens=16)
        # All requests end in one batch, so that work per batch does not count.
        records = ended.records[-REQUESTS:]
        with observers.collect_in_batches(lambda *_, **__: None), counting({BATCH}, None) as batch:
            for record in records:
                observers.end_record(record)
            observers.flush_batch()
    calls.functions += batch.functions
    assert list(interpreted(calls, REQUESTS)) == []


async def test_sweep_of_silent_streams_runs_through_compiled_modules(deploy: Deploy) -> None:
    gateway = await deploy()
    upstream = gateway.worker.upstream
    async with connected(gateway, STREAMS) as lines:
        with gateway.decoders[0].held():
            for line in lines:
                line.send(raw(request(Api.CHAT, stream=True)))
            for line in lines:
                await line.has(b"data: ")
            upstream.check_connections()
            with counting({SWEEP}, None) as calls:
                upstream.check_connections()  # no data has arrived since the last look
            assert upstream.busy_connections == STREAMS
        for line in lines:
            await line.has(b"data: [DONE]")
    assert list(interpreted(calls, STREAMS)) == []


def test_excluded_modules_are_not_compiled() -> None:
    assert not set(NOT_COMPILED).intersection(MODULES)
    assert all(Path(path).is_file() for path in NOT_COMPILED)


def test_constants_of_floats_are_tuples_of_any_length() -> None:
    """A constant tuple with a fixed number of floats has no value in the compiled build where it is a default."""
    texts = {path: Path(path).read_text(encoding="utf-8") for path in MODULES}
    assert [path for path, text in texts.items() if re.search(r"Final\[tuple\[float, (?!\.\.\.)", text)] == []


def assigned(class_: ast.ClassDef) -> set[str]:
    """Return the names to which the body of a class assigns a value, except class variables."""
    targets = [target for each in class_.body if isinstance(each, ast.Assign) for target in each.targets]
    annotated = [each for each in class_.body if isinstance(each, ast.AnnAssign) and each.value is not None]
    targets += [each.target for each in annotated if not ast.unparse(each.annotation).startswith("ClassVar")]
    return {target.id for target in targets if isinstance(target, ast.Name)}


def test_no_interpreted_class_overrides_an_attribute_of_a_compiled_one() -> None:
    """Compiled code reads the value of the compiled class. The constructor must assign another one."""
    classes = [
        (str(path), each)
        for path in sorted(Path("proxy").rglob("*.py"))
        for each in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(each, ast.ClassDef)
    ]
    compiled = {each.name: assigned(each) for path, each in classes if path in MODULES}
    overridden = [
        f"{path}: {each.name}.{name}"
        for path, each in classes
        if path not in MODULES
        for base in each.bases
        if isinstance(base, ast.Name)
        for name in assigned(each) & compiled.get(base.id, set())
    ]
    assert not overridden
