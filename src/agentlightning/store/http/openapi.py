"""Generates the OpenAPI 3.1 document of the REST API from the table of operations."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Final, cast

import msgspec

from agentlightning.resources import LLM, PromptTemplate, ProxyLLM
from agentlightning.rollouts import RolloutConfig
from agentlightning.store.base import LightningStoreBase
from agentlightning.store.http.encoding import BASE_PATH, Resources, version
from agentlightning.store.http.errors import Refusal
from agentlightning.store.http.operations import OPERATIONS, Operation

_REF: Final = "#/components/schemas/{name}"
_INTRODUCTION: Final = (
    "What a store of Agent Lightning offers. Times are seconds since the epoch (UTC). A refused request is answered "
    "with the type of the error and a message that names the value. POST requests may carry an `Idempotency-Key`: "
    "one that arrives again is answered as before and not done again."
)


@lru_cache(maxsize=2)
def document(with_token: bool) -> dict[str, Any]:
    """The whole document: the same object each time."""
    kinds: list[Any] = [Refusal]
    for operation in OPERATIONS:
        kinds += [kind for kind in (operation.body, operation.response) if kind is not None]
    schemas, components = msgspec.json.schema_components(kinds, schema_hook=_schema, ref_template=_REF)
    by_kind = dict(zip(map(repr, kinds), schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {f"{BASE_PATH}/health": {"get": _health()}}
    for operation in OPERATIONS:
        paths.setdefault(BASE_PATH + operation.path, {})[operation.verb.lower()] = _operation(operation, by_kind)
    result: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "Agent Lightning store", "version": version(), "description": _INTRODUCTION},
        "paths": paths,
        "components": {"schemas": dict(sorted(components.items()))},
    }
    if with_token:
        result["components"]["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
        result["security"] = [{"token": []}]
    return cast("dict[str, Any]", json.loads(msgspec.json.encode(result)))


def _schema(kind: type) -> dict[str, Any]:
    """msgspec's hook for types that it has no schema of."""
    if kind is RolloutConfig:
        return RolloutConfig.model_json_schema()
    if kind is Resources:
        one_of = [resource.model_json_schema() for resource in (LLM, ProxyLLM, PromptTemplate)]
        return {"type": "object", "additionalProperties": {"oneOf": one_of}}
    raise NotImplementedError(kind)


def _health() -> dict[str, Any]:
    properties = {"status": {"const": "ok"}, "version": {"type": "string"}, "protocol": {"type": "integer"}}
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    return {
        "operationId": "health",
        "summary": "Whether the store answers, and which version it is; asks for no token.",
        "security": [],
        "responses": {
            "200": _response("It does.", schema),
            "503": _response("The store is closed.", {"$ref": _REF.format(name="Refusal")}),
        },
    }


def _operation(operation: Operation, schemas: Mapping[str, Any]) -> dict[str, Any]:
    summary, text = describe(operation.method)
    result: dict[str, Any] = {
        "operationId": operation_id(operation),
        "summary": summary,
        "description": text,
        "tags": [operation.path.split("/")[1]],
        "parameters": _parameters(operation),
        "responses": {
            str(operation.status): _response("Done.", schemas[repr(operation.response)]),
            "4XX": _response("Refused: nothing was done.", {"$ref": _REF.format(name="Refusal")}),
            "5XX": _response("The store cannot do it now.", {"$ref": _REF.format(name="Refusal")}),
        },
    }
    if operation.body is not None:
        schema = schemas[repr(operation.body)]
        if operation.empty_is_allowed:
            schema = {"anyOf": [schema, {"type": "null"}]}
        content = {"application/json": {"schema": schema}}
        result["requestBody"] = {"required": not operation.empty_is_allowed, "content": content}
    return result


def operation_id(operation: Operation) -> str:
    """The name of the method; with the verb for further operations of the same method."""
    same = [each for each in OPERATIONS if each.method == operation.method]
    first = same[0] is operation
    return operation.method if first else f"{operation.method}_{operation.verb.lower()}"


def describe(method: str) -> tuple[str, str]:
    """(first sentence, whole text) of a method's docstring."""
    text = inspect.getdoc(getattr(LightningStoreBase, method)) or method.replace("_", " ").capitalize() + "."
    flat = " ".join(text.split())
    return flat.split(". ")[0].rstrip(".") + ".", flat


def _parameters(operation: Operation) -> list[dict[str, Any]]:
    text = {"type": "string", "minLength": 1}
    parameters = [{"name": name, "in": "path", "required": True, "schema": text} for name in operation.path_names]
    fields = msgspec.structs.fields(operation.request) if operation.in_query else ()
    if fields:
        (_,), components = msgspec.json.schema_components([operation.request], schema_hook=_schema, ref_template=_REF)
        properties = components[operation.request.__name__]["properties"]
        parameters += [
            {"name": name, "in": "query", "required": field.required, "schema": properties[name]}
            for field in fields
            for name in [field.encode_name]
        ]
    return parameters


def _response(text: str, schema: Mapping[str, Any]) -> dict[str, Any]:
    return {"description": text, "content": {"application/json": {"schema": schema}}}
