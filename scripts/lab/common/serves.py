"""Whether an installed `pdproxy` works by itself: simulated engines, the gateway, one streamed answer. For
scripts/test-deployment; the argument is the program.
"""

from __future__ import annotations

import json
import subprocess
import sys

from lab.common.fleet import Fleet
from lab.common.processes import clean_environment, fetch


def main(program: str) -> None:
    """Ends with an error if it does not."""
    for words in (["--version"], ["--help"], ["mock-engine", "--help"]):
        said = subprocess.run([program, *words], env=clean_environment(), capture_output=True, text=True, check=True)
        assert "pdproxy" in said.stdout
    with Fleet() as fleet:
        for role in ("prefill", "decode"):
            fleet.mock_engine(role, words=(program,))
        gateway = fleet.keep(fleet.gateway(words=(program,)))
        body = {"model": "sim", "prompt": "Hello", "max_tokens": 8, "stream": True}
        answer = fetch(gateway.url + "/v1/completions", json.dumps(body).encode())
        assert answer.endswith(b"data: [DONE]\n\n")


if __name__ == "__main__":
    main(sys.argv[1])
