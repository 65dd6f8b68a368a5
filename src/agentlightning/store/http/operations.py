"""The table of operations: which verb and path call which method of the store contract.

The types of requests and responses follow from the signatures of the contract (base.py). The routes, the methods of
the client and the OpenAPI 3.1 document are generated from this table. Paths and names are those of the 0.x REST API
where it has them. A batch (server.py) holds calls of the same methods, with the arguments as the contract has them.
"""

from __future__ import annotations

import inspect
import json
import re
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Annotated, Any, Final, Literal, Union, cast, get_args, get_origin, get_type_hints

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from agentlightning.resources import LLM, PromptTemplate, ProxyLLM
from agentlightning.rollouts import RolloutConfig
from agentlightning.store.base import LightningStoreBase
from agentlightning.store.http.encoding import (
    BASE_PATH,
    BODIES,
    INPUTS,
    Integer,
    Refusal,
    Resources,
    RolloutBody,
    UpdateWorkerRequest,
    arguments_of,
    decoder,
    from_wire,
    version,
)
from agentlightning.store.types import Unset


@dataclass(frozen=True)
class Operation:
    """A verb and path that call a method of the contract."""

    method: str
    verb: Literal["GET", "POST", "PUT", "DELETE"]
    path: str
    """Below /v1/agl; names in braces are parameters of the method."""
    status: int = 200
    request_type: type[Struct] | None = None
    """The type of the request if it does not follow from the method."""
    body_parameter: str | None = None
    """The parameter that is the whole body; by default, the body is an object with the parameters."""
    query_parameters: tuple[str, ...] = ()
    """Parameters in the query string of a request that also has a body."""
    cursor: str | None = None
    """The response is a page of a list, {items, limit, offset, total}; this field of an item is what `after` takes."""
    with_attempts: bool = False
    """Each rollout in the response comes with its latest attempt, if it has one."""
    result_field: str | None = None
    """The response is an object with this one field."""
    none_is_result: bool = False
    """None is a result, not a 404."""
    list_parameter: str | None = None
    """The list parameter of the method; the path parameter is its only item."""

    @cached_property
    def path_names(self) -> tuple[str, ...]:
        return tuple(re.findall(r"{(\w+)}", self.path))

    @cached_property
    def request(self) -> type[Struct]:
        """The type of the parameters that are neither in the path nor the whole body."""
        if self.request_type is not None:
            return self.request_type
        names = [name for name in parameters_of(self.method) if name not in (*self.path_names, self.list_parameter)]
        if self.body_parameter is not None:
            names = list(self.query_parameters)
        return _request_type(self.method, names, paged=self.cursor is not None)

    @cached_property
    def in_query(self) -> bool:
        """Whether these parameters are in the query string."""
        return self.verb in ("GET", "DELETE") or self.body_parameter is not None

    @cached_property
    def body(self) -> Any:
        """The type of the body; None if the request has none."""
        if self.body_parameter is not None:
            return _shape(hints_of(self.method)[self.body_parameter], rest=True)
        return None if self.in_query or not self.request.__struct_fields__ else self.request

    @cached_property
    def empty_is_allowed(self) -> bool:
        """Whether a request without a body is valid."""
        required = any(field.required for field in msgspec.structs.fields(self.request))
        return self.body is None or (self.body_parameter is None and not required)

    @cached_property
    def _decode(self) -> Any:
        return decoder(self.body)

    def decode_body(self, body: bytes) -> dict[str, Any]:
        """The arguments in a body."""
        if self.empty_is_allowed and body in (b"", b"null"):  # 0.x clients send null for nothing
            body = b"{}"
        decoded = self._decode(body)
        if self.body_parameter is not None:
            return {self.body_parameter: from_wire(decoded)}
        return arguments_of(decoded)

    @cached_property
    def response(self) -> Any:
        """The type of the response body."""
        result = _shape(hints_of(self.method)["return"], rest=True)
        if self.with_attempts:
            result = list[RolloutBody] if self.cursor else RolloutBody
        if self.cursor:
            name = get_args(result)[0].__name__.removesuffix("Body")
            return _struct(f"PageOf{name}", ("items", result), ("limit", int), ("offset", int), ("total", int | None))
        if self.result_field:
            return _struct(_camel(self.result_field), (self.result_field, result))
        if not self.none_is_result and get_origin(result) in (Union, types.UnionType):
            return _union([each for each in get_args(result) if each is not type(None)])
        return result


@lru_cache
def _struct(name: str, *fields: tuple[str, Any]) -> type[Struct]:
    return msgspec.defstruct(name, fields, kw_only=True)


def _camel(name: str) -> str:
    return "".join(part.title() for part in name.split("_"))


def parameters_of(method: str) -> dict[str, inspect.Parameter]:
    """The parameters of a method of the contract, without `self`."""
    parameters = dict(inspect.signature(getattr(LightningStoreBase, method)).parameters)
    del parameters["self"]
    return parameters


def hints_of(method: str) -> dict[str, Any]:
    return get_type_hints(getattr(LightningStoreBase, method))


_PAGE: Final[Mapping[str, tuple[Any, int]]] = {
    "limit": (Annotated[int, Meta(ge=-1, le=2**63 - 1)], -1),
    "offset": (Annotated[int, Meta(ge=0, le=2**63 - 1)], 0),
}


def _request_type(method: str, names: Sequence[str], paged: bool = False, rest: bool = True) -> type[Struct]:
    """A type of these parameters. One that is not given has the default of the contract."""
    hints, parameters = hints_of(method), parameters_of(method)
    fields: list[Any] = []
    for name in sorted(names, key=_PAGE.__contains__):
        shape = _shape(hints[name], rest)
        if paged and name in _PAGE:
            fields.append((name, *_PAGE[name]))
        elif parameters[name].default is inspect.Parameter.empty:
            fields.append((name, shape))
        else:
            fields.append((name, _union([shape, UnsetType]), UNSET))
    return msgspec.defstruct(f"{_camel(method)}Request", fields, kw_only=True, forbid_unknown_fields=True)


def _shape(kind: Any, rest: bool) -> Any:
    """The type that msgspec decodes for a type of the contract."""
    known = INPUTS | BODIES if rest else INPUTS
    if kind in known:
        return known[kind]
    if kind is int:
        return Integer
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return _union([_shape(each, rest) for each in inner if each is not Unset])
    if origin in (None, dict, Literal):
        return kind
    return list[_shape(inner[0], rest)]  # a Sequence or a list


def _union(kinds: Sequence[Any]) -> Any:
    return Union[tuple(kinds)]  # noqa: UP007  built at run time


def _list_and_search(method: str, path: str, cursor: str, with_attempts: bool = False) -> tuple[Operation, ...]:
    """A list, with its filters in the query string or, if they are long, in the body."""
    return (
        Operation(method, "GET", path, cursor=cursor, with_attempts=with_attempts),
        Operation(method, "POST", f"{path}/search", cursor=cursor, with_attempts=with_attempts),
    )


_rollout = "/rollouts/{rollout_id}"

OPERATIONS: Final[tuple[Operation, ...]] = (
    # the queue
    Operation("enqueue_many_rollouts", "POST", "/queues/rollouts/enqueue", 201),
    Operation("dequeue_many_rollouts", "POST", "/queues/rollouts/dequeue"),
    Operation("start_rollout", "POST", "/rollouts", 201),
    Operation("start_attempt", "POST", f"{_rollout}/attempts", 201),
    Operation("requeue_rollout", "POST", f"{_rollout}/requeue"),
    Operation("cancel_rollout", "POST", f"{_rollout}/cancel"),
    Operation("wait_for_rollouts", "POST", "/waits/rollouts"),
    # rollouts and attempts
    *_list_and_search("query_rollouts", "/rollouts", "rollout_id", with_attempts=True),
    Operation("count_rollouts", "POST", "/counts/rollouts", result_field="count"),
    Operation("get_rollout_by_id", "GET", _rollout, with_attempts=True),
    Operation("update_rollout", "POST", _rollout),
    *_list_and_search("query_attempts", f"{_rollout}/attempts", "attempt_id"),
    Operation("get_latest_attempt", "GET", f"{_rollout}/attempts/latest", none_is_result=True),
    Operation("update_attempt", "POST", f"{_rollout}/attempts/{{attempt_id}}"),
    Operation("get_latest_attempts", "POST", "/attempts/latest"),
    Operation("get_attempt", "GET", "/attempts/{attempt_id}"),
    # spans
    Operation("add_span", "POST", "/spans", 201, body_parameter="span"),
    Operation("add_many_spans", "POST", "/spans/batch", 201),
    *_list_and_search("query_spans", "/spans", "span_id"),
    Operation("newest_spans", "GET", "/spans/newest"),
    Operation("count_spans", "GET", f"{_rollout}/attempts/{{attempt_id}}/spans/count", result_field="count"),
    Operation("get_next_span_sequence_id", "POST", "/spans/next", result_field="sequence_id"),
    Operation("get_many_span_sequence_ids", "POST", "/spans/next/batch", result_field="sequence_ids"),
    # resources
    Operation("query_resources", "GET", "/resources", cursor="resources_id"),
    Operation(
        "add_resources", "POST", "/resources", 201, body_parameter="resources", query_parameters=("resources_id",)
    ),
    Operation("add_resources", "PUT", "/resources/{resources_id}", 201, body_parameter="resources"),
    Operation("get_latest_resources", "GET", "/resources/latest", none_is_result=True),
    Operation("get_resources_by_id", "GET", "/resources/{resources_id}"),
    Operation("update_resources", "POST", "/resources/{resources_id}", body_parameter="resources"),
    Operation("delete_resources", "DELETE", "/resources/{resources_id}", result_field="count"),
    # workers and queues
    *_list_and_search("query_workers", "/workers", "worker_id"),
    Operation("get_worker", "GET", "/workers/{worker_id}", none_is_result=True),
    Operation("update_worker", "POST", "/workers/{worker_id}", request_type=UpdateWorkerRequest),
    Operation("query_queues", "GET", "/queues"),
    Operation("update_queue", "POST", "/queues/{name}"),
    # keeping the store small
    Operation("statistics", "GET", "/statistics"),
    Operation("read_records", "POST", "/records/read"),
    Operation("add_records", "POST", "/records", 201, result_field="count"),
    Operation("delete_rollouts", "POST", "/records/delete", result_field="count"),
    Operation("delete_rollouts", "DELETE", _rollout, result_field="count", list_parameter="rollout_ids"),
    Operation("prune", "POST", "/prune"),
    Operation("vacuum", "POST", "/vacuum", none_is_result=True),
)

CURSORS: Final[dict[str, str | None]] = {
    operation.method: operation.cursor if "after" in parameters_of(operation.method) else None
    for operation in OPERATIONS
    if operation.cursor
}
"""The field of an item that `after` takes, by method that returns pages; None if the method has no `after`."""

SLOW: Final = frozenset({"statistics", "prune", "vacuum", "read_records", "add_records", "delete_rollouts"})
"""Methods that may take long; a client sends each call in a request of its own."""
SENDS_KEY: Final = frozenset(
    {
        "add_records",
        "delete_rollouts",
        "get_many_span_sequence_ids",
        "get_next_span_sequence_id",
        "requeue_rollout",
        "update_resources",
        "update_rollout",
    }
)
"""Methods that are not idempotent by nature: a client sends a key, under which the store remembers the result.
`update_attempt` is one of them if it sets metadata, which another client may have set again in between."""
ACCEPTS_KEY: Final = SENDS_KEY | {
    "add_many_spans",
    "add_resources",
    "add_span",
    "cancel_rollout",
    "enqueue_many_rollouts",
    "enqueue_rollout",
    "start_attempt",
    "start_rollout",
    "update_attempt",
}
"""Methods that are executed once if a key is given; each is one transaction. All others may be repeated."""


# -- calls in batches: the methods as the contract has them ----------------------------------------------------------


def _call_type(method: str) -> type[Struct]:
    fields: list[Any] = [
        ("arguments", _request_type(method, list(parameters_of(method)), rest=False)),
        ("key", str | None, None),
    ]
    return msgspec.defstruct(f"{_camel(method)}Call", fields, tag_field="method", tag=method, kw_only=True)


METHODS: Final = (*dict.fromkeys(operation.method for operation in OPERATIONS), "enqueue_rollout", "dequeue_rollout")
"""The methods that a batch may call."""
decode_call: Final = decoder(_union([_call_type(method) for method in METHODS]))


# -- the OpenAPI document ----------------------------------------------------------------------------------------------

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
