"""The REST API of the store: the shapes of what travels as JSON, and the table of operations, which verb and path call
which method of the store contract.

Most shapes are the types of the contract themselves (base.py). Where the published 0.x API has another shape (spans,
workers, resources), it is defined here once. Bodies are decoded with msgspec, which checks the types while it parses: a
body of the wrong shape is rejected whole.

The types of requests and responses follow from the signatures of the contract. The routes, the methods of the client
and the OpenAPI 3.1 document are generated from the table. Paths and names are those of the 0.x REST API where it has
them. A batch (server.py) holds calls of the same methods, with the arguments as the contract has them.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import inspect
import json
import re
import time
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, singledispatch
from typing import Annotated, Any, Final, Literal, Union, cast, get_args, get_origin, get_type_hints

import msgspec
import orjson
from msgspec import UNSET, Meta, Raw, Struct, UnsetType, structs
from pydantic import BaseModel, ValidationError

from agentlightning.errors import ConfigError
from agentlightning.resources import LLM, NamedResources, PromptTemplate, ProxyLLM, ResourcesUpdate, named_resources
from agentlightning.rollouts import Attempt, Rollout, RolloutConfig
from agentlightning.span import Span, SpanEvent
from agentlightning.store.base import LightningStoreBase, parameters_of
from agentlightning.store.http import BASE_PATH
from agentlightning.store.http.errors import Refusal, decode_error
from agentlightning.store.types import RolloutRecord, Unset, Worker
from agentlightning.tracing import conventions

PROTOCOL_VERSION: Final = 1
"""Version of `POST /v1/agl/calls`; server and client must have the same."""
PROTOCOL_HEADER: Final = {"agl-protocol": str(PROTOCOL_VERSION)}

Integer = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
"""An integer that the database can hold."""


def version() -> str:
    """The version of the installed package."""
    return importlib.metadata.version("agentlightning")


# -- shapes ----------------------------------------------------------------------------------------------------------


class Resources(dict[str, Any]):
    """A body of named resources: LLM and PromptTemplate by name."""


class SpanStatus(Struct, frozen=True):
    status_code: Literal["UNSET", "OK", "ERROR"] = "UNSET"
    description: str | None = None


class SpanContext(Struct, frozen=True):
    trace_id: str
    span_id: str
    is_remote: bool = False
    trace_state: dict[str, str] = {}


class EventBody(Struct):
    name: str
    attributes: dict[str, Any] | None = None
    timestamp: float | None = None


class LinkBody(Struct):
    context: SpanContext
    attributes: dict[str, Any] | None = None


class SpanResource(Struct, frozen=True):
    attributes: dict[str, Any] = {}
    schema_url: str = ""


class SpanBody(Struct, kw_only=True):
    """A span in the 0.x shape. `trace_id`, `span_id` and `parent_id` take precedence over `context` and `parent`."""

    rollout_id: str
    attempt_id: str
    sequence_id: Integer = 0
    trace_id: str = ""
    span_id: str = ""
    parent_id: str | None = None
    name: str
    status: SpanStatus = SpanStatus()
    attributes: dict[str, Any] = {}
    events: list[EventBody] = []
    links: list[LinkBody] = []
    start_time: float | None = None
    end_time: float | None = None
    context: SpanContext | None = None
    parent: SpanContext | None = None
    resource: SpanResource = SpanResource()


class WorkerBody(Struct, kw_only=True):
    """A worker in the 0.x shape, where a lost worker has status `unknown`; `lost` is our addition."""

    worker_id: str
    status: Literal["idle", "busy", "unknown"]
    lost: bool
    heartbeat_stats: dict[str, Any]
    last_heartbeat_time: float | None
    current_rollout_id: str | None
    current_attempt_id: str | None
    open_attempts: int
    lease_seconds: float | None
    last_error: dict[str, Any] | None


class UpdateWorkerRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    stats: dict[str, Any] | UnsetType = msgspec.field(default=UNSET, name="heartbeat_stats")
    lease_seconds: float | UnsetType | None = UNSET


class ResourcesBody(Struct):
    resources_id: str
    version: int
    create_time: float
    update_time: float
    resources: Resources


class RolloutBody(Rollout, frozen=True, kw_only=True):
    """A rollout in a list. `attempt` is its latest attempt, left out if it has none."""

    attempt: Attempt | UnsetType = UNSET


class RecordBody(Struct):
    rollout: Rollout
    attempts: list[Attempt] = []
    spans: list[SpanBody] = []


# -- conversion ------------------------------------------------------------------------------------------------------


_STARTED: Final = time.monotonic()


@singledispatch
def to_rest(value: Any) -> Any:
    """A result of the contract in its shape in the REST API."""
    return value


@to_rest.register(list)
def _(values: list[Any]) -> list[Any]:
    return [*map(to_rest, values)]


@singledispatch
def from_wire(value: Any) -> Any:
    """A decoded argument as the contract takes it."""
    return value


@from_wire.register(list)
def _(values: list[Any]) -> list[Any]:
    if values and isinstance(values[0], Struct):
        return [*map(from_wire, values)]
    return values  # JSON, as deep as it is


@to_rest.register
def span_body(span: Span) -> SpanBody:
    fields = structs.asdict(span)
    fields["status"] = SpanStatus(fields.pop("status_code"), fields.pop("status_message"))
    fields["events"] = [EventBody(event.name, event.attributes, event.timestamp) for event in span.events]
    fields["links"] = [*map(_link_body, conventions.links_of(span.attributes))]
    fields["context"] = _context(span.trace_id, span.span_id, span.attributes.get(conventions.TRACE_STATE))
    fields["parent"] = SpanContext(span.trace_id, span.parent_id) if span.parent_id else None
    fields["resource"] = SpanResource(span.resource)
    return SpanBody(**fields)


def span_of(body: SpanBody) -> Span:
    fields = structs.asdict(body)
    status, context, parent, links = [fields.pop(name) for name in ("status", "context", "parent", "links")]
    start = fields["start_time"] = time.time() if body.start_time is None else body.start_time
    if context is not None:
        fields["trace_id"] = body.trace_id or context.trace_id
        fields["span_id"] = body.span_id or context.span_id
    if parent is not None:
        fields["parent_id"] = body.parent_id or parent.span_id
    conventions.add_extra_fields(body.attributes, state=_state_of(context), links=[*map(_link_of, links)])
    fields["events"] = tuple(
        [
            SpanEvent(event.name, start if event.timestamp is None else event.timestamp, event.attributes or {})
            for event in body.events
        ]
    )
    fields["resource"] = body.resource.attributes
    return Span(**fields, status_code=status.status_code, status_message=status.description)


def _link_of(body: LinkBody) -> dict[str, Any]:
    context = body.context
    return conventions.link(context.trace_id, context.span_id, body.attributes or {}, _state_of(context))


def _link_body(link: Mapping[str, Any]) -> LinkBody:
    return LinkBody(_context(link["trace_id"], link["span_id"], link["trace_state"]), link["attributes"])


def _state_of(context: SpanContext | None) -> str:
    return ",".join(f"{key}={value}" for key, value in context.trace_state.items()) if context else ""


def _context(trace_id: str, span_id: str, state: Any) -> SpanContext:
    """state: as in the W3C header."""
    entries = dict(each.strip().split("=", 1) for each in str(state).split(",") if "=" in each)
    return SpanContext(trace_id, span_id, trace_state=entries)


@from_wire.register
def _received(body: SpanBody) -> Span:
    """The span, with our attributes added where it uses other conventions, such as those of 0.x for rewards."""
    span = span_of(body)
    name = conventions.complete(span.name, span.attributes, span.events)
    return span if name == span.name else structs.replace(span, name=name)


@from_wire.register
def _record_of(body: RecordBody) -> RolloutRecord:
    return RolloutRecord(body.rollout, tuple(body.attempts), tuple(map(span_of, body.spans)))


@to_rest.register(dict)
def statistics_body(counts: Mapping[str, int]) -> dict[str, int | float | str]:
    """The counts, with what 0.x clients expect: a name, the totals and the uptime of the server in seconds."""
    names = ("attempts", "spans", "resources", "workers")
    totals = {f"total_{name}": counts[name] for name in names if name in counts}
    rollouts = sum(number for name, number in counts.items() if name.startswith("rollouts."))
    uptime = time.monotonic() - _STARTED
    return {**counts, "total_rollouts": rollouts, **totals, "name": "LightningStore", "uptime": uptime}


@to_rest.register
def worker_body(worker: Worker) -> WorkerBody:
    fields = dataclasses.asdict(worker)
    fields["heartbeat_stats"] = fields.pop("stats")
    fields["status"] = "unknown" if worker.status == "lost" else worker.status
    return WorkerBody(lost=worker.status == "lost", **fields)


@to_rest.register
def resources_body(update: ResourcesUpdate) -> ResourcesBody:
    created, updated = update.create_time, update.update_time
    changed = created if updated is None else updated
    return ResourcesBody(update.resources_id, update.version, created, changed, Resources(update.resources))


@to_rest.register
def record_body(record: RolloutRecord) -> RecordBody:
    return RecordBody(record.rollout, list(record.attempts), [*map(span_body, record.spans)])


INPUTS: Final[dict[Any, Any]] = {NamedResources: Resources, int: Integer}
"""Types of arguments that are decoded as another shape, in the REST API and in batches."""
BODIES: Final[dict[Any, Any]] = {
    **INPUTS,
    dict[str, int]: dict[str, int | float | str],
    Span: SpanBody,
    Worker: WorkerBody,
    ResourcesUpdate: ResourcesBody,
    RolloutRecord: RecordBody,
}
"""Types of the contract that have another shape in the REST API."""


def arguments_of(request: Struct) -> dict[str, Any]:
    """The arguments of a method in a decoded request, without those that were not given, as the contract takes them."""
    given = {name: getattr(request, name) for name in request.__struct_fields__}
    return {name: from_wire(value) for name, value in given.items() if value is not UNSET}


# -- decoding and encoding -------------------------------------------------------------------------------------------


def _encode_unknown(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    raise NotImplementedError(f"{type(value).__name__} has no JSON form")


encode: Final = msgspec.json.Encoder(enc_hook=_encode_unknown).encode


def decode_unknown(kind: type, value: Any) -> Any:
    """msgspec's hook for types that it cannot decode itself."""
    if kind is RolloutConfig:
        return _decode_config(orjson.dumps(value))
    if kind is Resources:
        return Resources(check_resources(value, strict=True))
    raise NotImplementedError(f"{kind} cannot be read")


@lru_cache(maxsize=256)
def _decode_config(text: bytes) -> RolloutConfig:
    try:
        return RolloutConfig.model_validate_json(text, strict=True)
    except ValidationError as error:
        raise ConfigError(f"this is not the configuration of a rollout: {error}") from None


def check_resources(value: Any, strict: bool = False) -> NamedResources:
    try:
        return named_resources.validate_python(value, strict=strict)
    except ValidationError as error:
        raise ConfigError(f"resources must be a dict of LLM and PromptTemplate by name: {error}") from None


def decoder(kind: Any) -> Callable[[bytes | Raw], Any]:
    """A function that decodes JSON of this type. It raises RequestError, which says what is wrong and where."""
    read = msgspec.json.Decoder(kind, dec_hook=decode_unknown).decode

    def decode(data: bytes | Raw) -> Any:
        try:
            return read(data)
        except (msgspec.MsgspecError, UnicodeError, RecursionError, ConfigError) as error:
            raise decode_error(error, bytes(data)) from None

    return decode


# -- the table of operations -----------------------------------------------------------------------------------------


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
    """The parameter that is the whole body, and others are in the query string; by default, the body is an object with
    the parameters."""
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
        apart = (*self.path_names, self.list_parameter, self.body_parameter)
        names = [name for name in parameters_of(self.method) if name not in apart]
        return self.request_type or _request_type(self.method, names, BODIES)

    @cached_property
    def in_query(self) -> bool:
        """Whether these parameters are in the query string."""
        return self.verb in ("GET", "DELETE") or self.body_parameter is not None

    @cached_property
    def body(self) -> Any:
        """The type of the body; None if the request has none."""
        if self.body_parameter is not None:
            return _shape(hints_of(self.method)[self.body_parameter], BODIES)
        return None if self.in_query or not self.request.__struct_fields__ else self.request

    @cached_property
    def empty_is_allowed(self) -> bool:
        """Whether a request without a body is valid."""
        required = any(field.required for field in structs.fields(self.request))
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
        result = _shape(hints_of(self.method)["return"], BODIES)
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


def hints_of(method: str) -> dict[str, Any]:
    return get_type_hints(getattr(LightningStoreBase, method))


_PAGE: Final[Mapping[str, tuple[Any, int]]] = {
    "limit": (Annotated[int, Meta(ge=-1, le=2**63 - 1)], -1),
    "offset": (Annotated[int, Meta(ge=0, le=2**63 - 1)], 0),
}


def _request_type(method: str, names: Iterable[str], shapes: Mapping[Any, Any]) -> type[Struct]:
    """A type of these parameters. One that is not given has the default of the contract."""
    hints, parameters = hints_of(method), parameters_of(method)
    paged = shapes is BODIES and "offset" in parameters
    fields: list[Any] = []
    for name in sorted(names, key=_PAGE.__contains__):
        shape = _shape(hints[name], shapes)
        if paged and name in _PAGE:
            fields.append((name, *_PAGE[name]))
        elif parameters[name].default is inspect.Parameter.empty:
            fields.append((name, shape))
        else:
            fields.append((name, _union([shape, UnsetType]), UNSET))
    return msgspec.defstruct(f"{_camel(method)}Request", fields, kw_only=True, forbid_unknown_fields=True)


def _shape(kind: Any, shapes: Mapping[Any, Any]) -> Any:
    """The type that msgspec decodes for a type of the contract."""
    if kind in shapes:
        return shapes[kind]
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return _union([_shape(each, shapes) for each in inner if each is not Unset])
    if origin in (None, dict, Literal):
        return kind
    return list[_shape(inner[0], shapes)]  # a Sequence or a list


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
    Operation("add_resources", "POST", "/resources", 201, body_parameter="resources"),
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
    fields: list[Any] = [("arguments", _request_type(method, parameters_of(method), INPUTS)), ("key", str | None, None)]
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
    first = next(each for each in OPERATIONS if each.method == operation.method)
    return operation.method if operation is first else f"{operation.method}_{operation.verb.lower()}"


def describe(method: str) -> tuple[str, str]:
    """(first sentence, whole text) of a method's docstring."""
    text = inspect.getdoc(getattr(LightningStoreBase, method)) or method.replace("_", " ").capitalize() + "."
    flat = " ".join(text.split())
    return flat.split(". ")[0].rstrip(".") + ".", flat


def _parameters(operation: Operation) -> list[dict[str, Any]]:
    text = {"type": "string", "minLength": 1}
    parameters = [{"name": name, "in": "path", "required": True, "schema": text} for name in operation.path_names]
    if operation.in_query:
        _, components = msgspec.json.schema_components([operation.request], schema_hook=_schema, ref_template=_REF)
        schemas = components[operation.request.__name__]["properties"]
        required = {field.encode_name: field.required for field in structs.fields(operation.request)}
        parameters += [
            {"name": name, "in": "query", "required": required[name], "schema": schema}
            for name, schema in schemas.items()
        ]
    return parameters


def _response(text: str, schema: Mapping[str, Any]) -> dict[str, Any]:
    return {"description": text, "content": {"application/json": {"schema": schema}}}
