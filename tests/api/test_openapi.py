"""The description of the routes: valid, complete, and true of the answers."""

from __future__ import annotations

from typing import Any

import pytest
from jsonschema import Draft202012Validator
from openapi_spec_validator import OpenAPIV31SpecValidator

from proxy.api.openapi import OPERATIONS, make_openapi_document
from proxy.wire.openai import Api
from tests.asking import read, request
from tests.conftest import Deploy
from tests.deployment import Deployment


async def described(gateway: Deployment) -> dict[str, Any]:
    async with gateway.session.get(gateway.url + "/openapi.json") as response:
        assert response.status == 200
        found: dict[str, Any] = await response.json()
        return found


async def listed(gateway: Deployment) -> set[str]:
    """Return the routes of clients, as `GET /` lists them."""
    async with gateway.session.get(gateway.url) as response:
        return set((await response.json())["routes"])


@pytest.mark.parametrize("connector", ["vllm_pull", "sglang_bootstrap", "plain"])
async def test_description_is_valid_and_has_every_route(deploy: Deploy, connector: str) -> None:
    gateway = await deploy(connector=connector)
    found = await described(gateway)
    OpenAPIV31SpecValidator(found).validate()
    routes = {f"{method.upper()} {path}" for path, methods in found["paths"].items() for method in methods}
    assert routes >= {*await listed(gateway), "POST /instances/add", "GET /admin/requests/recent", "GET /metrics"}
    assert {*found["paths"]} - OPERATIONS.keys() == set(), "add them to OPERATIONS"


async def test_every_described_operation_is_a_route_of_some_connector(deploy: Deploy) -> None:
    connectors = ("vllm_pull", "sglang_bootstrap")
    paths = [path for connector in connectors for path in (await described(await deploy(connector=connector)))["paths"]]
    assert OPERATIONS.keys() - {*paths} == set()


async def test_routes_of_operators_are_described_where_they_are_served(deploy: Deploy) -> None:
    gateway = await deploy(admin={"port": 0})
    assert "/instances/add" not in (await described(gateway))["paths"]


async def test_error_has_the_described_form(deploy: Deploy) -> None:
    gateway = await deploy()
    found = await described(gateway)
    answer = await gateway.ask(request(Api.CHAT, messages=3))
    assert answer.status == 400
    Draft202012Validator(found["components"]["schemas"]["Error"]).validate(answer.json)


async def test_described_requests_are_accepted(deploy: Deploy) -> None:
    gateway = await deploy()
    schemas = (await described(gateway))["components"]["schemas"]
    body = request(Api.CHAT, max_tokens=2)
    Draft202012Validator(schemas["Chat"]).validate(body)
    assert (await gateway.ask(body)).status == 200
    change = {"type": "decode", "instances": [f"127.0.0.1:{gateway.decoders[0].port}"], "weight": 50}
    Draft202012Validator(schemas["Weight"]).validate(change)
    async with gateway.session.post(gateway.url + "/instances/weight", json=change) as response:
        assert (await read(response)).status == 200


def test_operation_ids_are_unique() -> None:
    paths = make_openapi_document([("POST", path) for path in OPERATIONS])["paths"]
    assert len({methods["post"]["operationId"] for methods in paths.values()}) == len(OPERATIONS)


def test_route_without_a_description_is_named_by_its_path() -> None:
    found = make_openapi_document([("GET", "/new/{name}")])
    OpenAPIV31SpecValidator(found).validate()
    assert found["paths"]["/new/{name}"]["get"]["summary"] == "GET /new/{name}"
