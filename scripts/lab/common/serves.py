"""Whether an installed `pdproxy` works by itself: simulated engines, the gateway, one streamed answer. For
scripts/test-deployment; the argument is the program.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from urllib.request import Request, urlopen

from lab.common.processes import HOST, clean_environment, free_ports, running, wait_until_ready


def main(program: str) -> None:
    """Ends with an error if it does not."""
    for words in (["--version"], ["--help"], ["mock-engine", "--help"]):
        said = subprocess.run([program, *words], env=clean_environment(), capture_output=True, text=True, check=True)
        assert "pdproxy" in said.stdout
    gateway, prefill, decode = free_ports(3)
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        for role, port in (("prefill", prefill), ("decode", decode)):
            engine = [program, "mock-engine", "--role", role, "--port", str(port)]
            stack.enter_context(running(role, engine, port, directory / f"{role}.log"))
        addresses = ["--prefill", f"{HOST}:{prefill}", "--decode", f"{HOST}:{decode}"]
        command = [program, "--port", str(gateway), *addresses]
        stack.enter_context(running("the gateway", command, gateway, directory / "gateway.log"))
        wait_until_ready("the gateway", gateway, "/readyz")
        body = {"model": "sim", "prompt": "Hello", "max_tokens": 8, "stream": True}
        headers = {"Content-Type": "application/json"}
        asked = Request(f"http://{HOST}:{gateway}/v1/completions", json.dumps(body).encode(), headers)
        with urlopen(asked, timeout=30) as answer:
            assert answer.read().endswith(b"data: [DONE]\n\n")


if __name__ == "__main__":
    main(sys.argv[1])
