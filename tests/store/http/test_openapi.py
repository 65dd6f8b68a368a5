"""The OpenAPI document: valid, complete, and true."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
from tools.reference.__main__ import requests

from agentlightning.server.app import Server
from agentlightning.store import InMemoryLightningStore, LightningStoreBase
from agentlightning.store.http import BASE_PATH
from agentlightning.store.http.operations import OPERATIONS, document


@pytest.fixture(scope="module")
def made() -> dict[str, Any]:
    return document(with_token=False)


def test_every_schema_is_valid_and_every_reference_leads_somewhere(made: dict[str, Any]) -> None:
    def look(value: Any) -> None:
        if isinstance(value, dict):
            if "$ref" in value:
                assert value["$ref"].removeprefix("#/components/schemas/") in made["components"]["schemas"]
            for each in value.values():
                look(each)
        elif isinstance(value, list):
            for each in value:
                look(each)

    look(made)
    assert made["openapi"] == "3.1.0"
    for schema in made["components"]["schemas"].values():
        jsonschema_rs.meta.validate(schema)


def test_every_operation_is_there_and_described_by_the_contract(made: dict[str, Any]) -> None:
    shown = {
        (verb.upper(), path): operation for path, verbs in made["paths"].items() for verb, operation in verbs.items()
    }
    assert len({operation["operationId"] for operation in shown.values()}) == len(shown)
    for operation in OPERATIONS:
        there = shown.pop((operation.verb, f"/v1/agl{operation.path}"))
        said = " ".join((getattr(LightningStoreBase, operation.method).__doc__ or there["description"]).split())
        assert there["description"] == said
    assert list(shown) == [("GET", "/v1/agl/health")]


def test_requests_are_those_of_the_signatures(made: dict[str, Any]) -> None:
    schemas = made["components"]["schemas"]
    assert set(schemas["WaitForRolloutsRequest"]["properties"]) == {"rollout_ids", "timeout", "minimum"}
    assert schemas["WaitForRolloutsRequest"]["required"] == ["rollout_ids"]
    dequeue = made["paths"]["/v1/agl/queues/rollouts/dequeue"]["post"]
    assert dequeue["requestBody"]["required"] is False
    listed = {each["name"]: each for each in made["paths"]["/v1/agl/spans"]["get"]["parameters"]}
    assert listed["rollout_id"]["required"] is True
    assert {"name_contains", "after", "limit", "offset"} <= set(listed)


def structure(document: dict[str, Any]) -> str:
    """The document without its version and prose, as a line of JSON for each operation and schema."""

    def without_prose(value: Any) -> Any:
        if isinstance(value, list):
            return [without_prose(each) for each in value]
        if not isinstance(value, dict):
            return value
        prose = [name for name in ("description", "summary") if isinstance(value.get(name), str)]
        return {name: without_prose(each) for name, each in value.items() if name not in prose}

    def lines(values: dict[str, Any]) -> Iterator[str]:
        for name, value in values.items():
            yield f"{name} {json.dumps(without_prose(value), sort_keys=True, separators=(',', ':'))}\n"

    operations = {f"{verb} {path}": each for path, verbs in document["paths"].items() for verb, each in verbs.items()}
    return "".join([*lines(operations), *lines(document["components"]["schemas"])])


def test_the_api_is_the_published_one(made: dict[str, Any]) -> None:
    """A change of the API is made on purpose: write the file anew with `structure(document(with_token=False))`."""
    assert structure(made) == (Path(__file__).parent / "api.txt").read_text()


def test_a_token_is_asked_for_where_there_is_one() -> None:
    secured = document(with_token=True)
    assert secured["security"] == [{"token": []}]
    assert secured["paths"]["/v1/agl/health"]["get"]["security"] == []


def test_the_table_of_the_reference_has_every_request() -> None:
    rows = [line for line in requests().splitlines() if line.startswith("| `")]
    assert len(rows) == len(OPERATIONS)
    assert all(f"| `{each.verb} {BASE_PATH}{each.path}` |" in row for each, row in zip(OPERATIONS, rows, strict=True))


@pytest.mark.slow
@pytest.mark.timeout(580)
@pytest.mark.parametrize("token", [None, "right"])
async def test_schemathesis_finds_no_server_error_and_no_answer_outside_the_document(
    token: str | None, tmp_path: Path
) -> None:
    store = InMemoryLightningStore()
    checks = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"
    checks += ",negative_data_rejection,unsupported_method,ignored_auth"
    async with Server(store, secret="s", token=token) as server:
        process = await asyncio.create_subprocess_exec(
            Path(sys.executable).with_name("st"),
            "run",
            f"{server.url}/v1/agl/openapi.json",
            *("--phases", "coverage,fuzzing", "--max-examples", "10", "--continue-on-failure", "--no-color"),
            "--suppress-health-check=too_slow",
            *("--request-timeout", "30", "--checks", checks),
            *(("--header", f"Authorization: Bearer {token}") if token else ()),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            cwd=tmp_path,
        )
        printed, _ = await process.communicate()
    await store.close()
    assert process.returncode == 0, printed.decode()[-6000:]
    assert re.search(r"\d{3,} generated, \d{3,} passed", printed.decode())
