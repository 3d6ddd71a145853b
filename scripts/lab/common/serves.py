"""Check an installed `pdproxy`: simulated engines, the gateway, and one streamed answer.

scripts/test-deployment runs it. The argument is the program.
"""

from __future__ import annotations

import json
import subprocess
import sys

from lab.common.fleet import Fleet
from lab.common.processes import clean_environment, fetch


def main(program: str) -> None:
    """Run the check. Raises AssertionError or CalledProcessError if it fails."""
    for words in (["--version"], ["--help"], ["mock-engine", "--help"]):
        result = subprocess.run([program, *words], env=clean_environment(), capture_output=True, text=True, check=True)
        assert "pdproxy" in result.stdout
    with Fleet() as fleet:
        for role in ("prefill", "decode"):
            fleet.mock_engine(role, words=(program,))
        gateway = fleet.keep(fleet.gateway(words=(program,)))
        body = {"model": "sim", "prompt": "Hello", "max_tokens": 8, "stream": True}
        answer = fetch(gateway.url + "/v1/completions", json.dumps(body).encode())
        assert answer.endswith(b"data: [DONE]\n\n")


if __name__ == "__main__":
    main(sys.argv[1])
