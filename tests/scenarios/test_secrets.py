"""What must not be written down is not, at any log level, whatever happens."""

from __future__ import annotations

import orjson
import pytest

from proxy.wire.openai import OPENAI_APIS, Api
from tests.asking import ask, request
from tests.scenarios.conftest import Site
from tests.scenarios.program import gateway

CANARY = "c4n4ry"


@pytest.mark.parametrize("log_format", ["text", "json"])
async def test_keys_and_prompts_are_in_no_line(site: Site, log_format: str) -> None:
    secrets = {"OPENAI_API_KEY": CANARY + "-engine", "PROXY_AUTH__ADMIN_KEY": CANARY + "-admin"}
    async with gateway(*site.engines, "--log-level", "debug", "--log-format", log_format, **secrets) as program:
        url = program.url
        bodies = [request(api, CANARY, stream=stream, user=CANARY) for api in OPENAI_APIS for stream in (True, False)]
        for body in bodies:
            await ask(site.session, url, body, authorization=f"Bearer {CANARY}-client")
        site.prefiller.faults.add("refuse_status", status=500, body={"error": CANARY})
        for body in bodies:
            assert CANARY.encode() in (await ask(site.session, url, body)).body
        site.prefiller.faults.clear()
        site.decoder.faults.add("reset_after_tokens", tokens=2)
        for body in bodies:
            await ask(site.session, url, body)
        for path in (f"/nowhere/{CANARY}", f"/v1/models?key={CANARY}", "/metrics", "/healthcheck"):
            async with site.session.get(url + path, headers={"Authorization": f"Bearer {CANARY}-admin"}) as response:
                metrics = await response.text()
            assert CANARY not in metrics or path.startswith("/nowhere")
        async with site.session.post(url + Api.CHAT.path, data=b'{"messages": "' + CANARY.encode()) as response:
            assert response.status == 400
        instance = {"type": "prefill", "instances": [CANARY]}
        for key in ("wrong", "admin"):
            headers = {"Authorization": f"Bearer {CANARY}-{key}"}
            async with site.session.post(url + "/instances/add", json=instance, headers=headers) as response:
                assert response.status in (400, 401, 403)
        await ask(site.session, url, request(Api.CHAT), x_request_id="the-last")
        await program.says("the-last")
    assert program.output.count("proxy.access") >= 3 * len(bodies)
    assert CANARY not in program.output
    if log_format == "json":
        assert all(orjson.loads(line) for line in program.output.splitlines())
