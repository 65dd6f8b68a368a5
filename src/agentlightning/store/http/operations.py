"""The table of operations: which verb and path calls which method of the store contract.

The types of requests and responses follow from the signatures of the contract (base.py). The routes, the methods of
the client and the OpenAPI document are generated from this table. Paths and names are those of the 0.x REST API where
it has them.
"""

from __future__ import annotations

import inspect
import re
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Annotated, Any, Final, Literal, Union, cast, get_args, get_origin, get_type_hints

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from agentlightning.resources import NamedResources
from agentlightning.span import Span
from agentlightning.store.base import LightningStoreBase
from agentlightning.store.http.encoding import decoder, result_decoder
from agentlightning.store.http.shapes import BODIES, INPUTS, Integer, RolloutBody
from agentlightning.store.types import Unset


@dataclass(frozen=True)
class Operation:
    """A verb and path that call a method of the contract."""

    method: str
    verb: Literal["GET", "POST", "PUT", "DELETE"]
    path: str
    """Below /v1/agl; names in braces are parameters of the method."""
    status: int = 200
    body_parameter: str | None = None
    """The parameter that is the whole body; by default, the body is an object with the parameters."""
    query_parameters: tuple[str, ...] = ()
    """Parameters in the query string of a request that also has a body."""
    aliases: Mapping[str, str] = field(default_factory=dict[str, str])
    """Parameters that have another name in the request."""
    non_null: tuple[str, ...] = ()
    """Parameters that may be left out, but not null."""
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

    @property
    def waits(self) -> bool:
        """Whether a call may take as long as its `timeout`."""
        return "timeout" in self.parameters

    @cached_property
    def parameters(self) -> dict[str, inspect.Parameter]:
        return parameters_of(self.method)

    @cached_property
    def path_names(self) -> tuple[str, ...]:
        return tuple(re.findall(r"{(\w+)}", self.path))

    @cached_property
    def request(self) -> type[Struct]:
        """The type of the query of a GET, and of the body of other requests, without path parameters."""
        elsewhere = {*self.path_names, self.body_parameter, self.list_parameter, *self.query_parameters}
        return _request(self, [name for name in self.parameters if name not in elsewhere])

    @cached_property
    def query_request(self) -> type[Struct]:
        """The type of the query string of a request that also has a body."""
        return _request(self, list(self.query_parameters))

    @cached_property
    def body(self) -> Any:
        """The type of the body; None if the request has none."""
        if self.verb in ("GET", "DELETE"):
            return None
        if self.body_parameter is not None:
            return _shape(hints_of(self.method)[self.body_parameter], rest=True)
        return self.request if self.request.__struct_fields__ else None

    @cached_property
    def decode_body(self) -> Any:
        return decoder(self.body)

    @cached_property
    def empty_is_allowed(self) -> bool:
        """Whether a request without a body is valid."""
        return self.body is None or (self.body_parameter is None and not _required(self.request))

    @cached_property
    def response(self) -> Any:
        """The type of the response body."""
        result = _shape(hints_of(self.method)["return"], rest=True)
        if self.method == "statistics":
            result = dict[str, int | float | str]
        if self.with_attempts:
            result = list[RolloutBody] if self.cursor else RolloutBody
        if self.cursor:
            return _page_type(result)
        if self.result_field:
            return _scalar_type(self.result_field, result)
        if not self.none_is_result and get_origin(result) in (Union, types.UnionType):
            return _union([each for each in get_args(result) if each is not type(None)])
        return result

    def arguments(self, request: Struct) -> dict[str, Any]:
        """The arguments of the method in a decoded request, without those that were not given."""
        arguments: dict[str, Any] = {}
        for name in request.__struct_fields__:
            value = getattr(request, name)
            if value is not UNSET:
                arguments[name] = value
        return arguments


@lru_cache
def _page_type(items: Any) -> type[Struct]:
    name = get_args(items)[0].__name__.removesuffix("Body")
    fields: list[Any] = [("items", items), ("limit", int), ("offset", int), ("total", int | None)]
    return msgspec.defstruct(f"PageOf{name}", fields, kw_only=True)


@lru_cache
def _scalar_type(name: str, kind: Any) -> type[Struct]:
    return msgspec.defstruct(_camel(name), [(name, kind)], kw_only=True)


def _camel(name: str) -> str:
    return "".join(part.title() for part in name.split("_"))


def parameters_of(method: str) -> dict[str, inspect.Parameter]:
    """The parameters of a method of the contract, without `self`."""
    parameters = dict(inspect.signature(getattr(LightningStoreBase, method)).parameters)
    del parameters["self"]
    return parameters


def hints_of(method: str) -> dict[str, Any]:
    return get_type_hints(getattr(LightningStoreBase, method))


def _request(operation: Operation, names: list[str]) -> type[Struct]:
    paged = operation.cursor is not None
    names = [name for name in names if not (paged and name in ("limit", "offset"))]
    fields = [_without_null(item, operation.non_null) for item in _fields(operation.method, names, rest=True)]
    if paged:
        fields += _PAGE
    return msgspec.defstruct(
        _camel(operation.method) + "Request",
        fields,
        rename=dict(operation.aliases) or None,
        kw_only=True,
        forbid_unknown_fields=True,
    )


def _without_null(item: tuple[Any, ...], names: Sequence[str]) -> tuple[Any, ...]:
    """The field without None in its type if it is one of `names`."""
    name, kind, *default = item
    if name not in names:
        return item
    return (name, _union([each for each in get_args(kind) if each is not type(None)]), *default)


_PAGE: Final[tuple[tuple[str, Any, int], ...]] = (
    ("limit", Annotated[int, Meta(ge=-1, le=2**63 - 1)], -1),
    ("offset", Annotated[int, Meta(ge=0, le=2**63 - 1)], 0),
)


def _fields(method: str, names: Sequence[str], rest: bool) -> list[Any]:
    hints, parameters = hints_of(method), parameters_of(method)
    fields: list[Any] = []
    for name in names:
        shape, default = _shape(hints[name], rest), parameters[name].default
        if default is inspect.Parameter.empty:
            fields.append((name, shape))
        else:  # an argument that is not given has the default of the contract
            fields.append((name, _union([shape, UnsetType]), UNSET))
    return fields


def _required(request: type[Struct]) -> bool:
    return any(item.required for item in msgspec.structs.fields(request))


def _shape(kind: Any, rest: bool) -> Any:
    """The type that msgspec decodes for a type of the contract."""
    if kind in INPUTS:
        return INPUTS[kind]
    if rest and kind in BODIES:
        return BODIES[kind][0]
    if kind is int:
        return Integer
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return _union([_shape(each, rest) for each in inner if each is not Unset])
    if origin is dict and kind != NamedResources:
        return kind
    if inner and origin is not None and origin is not Literal:
        return list[_shape(inner[0], rest)]  # a Sequence or a list
    return kind


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
    Operation(
        "update_worker", "POST", "/workers/{worker_id}", aliases={"stats": "heartbeat_stats"}, non_null=("stats",)
    ),
    Operation("query_queues", "GET", "/queues"),
    Operation("update_queue", "POST", "/queues/{name}"),
    # keeping the store small
    Operation("statistics", "GET", "/statistics"),
    Operation("read_records", "POST", "/records/read"),
    Operation("add_records", "POST", "/records", 201, result_field="count"),
    Operation("delete_rollouts", "POST", "/records/delete", result_field="count"),
    Operation("delete_rollouts", "DELETE", _rollout, result_field="count", list_parameter="rollout_ids"),
    Operation("prune", "POST", "/prune"),
    Operation("vacuum", "POST", "/vacuum"),
)

CURSORS: Final[dict[str, str | None]] = {
    operation.method: operation.cursor if "after" in operation.parameters else None
    for operation in OPERATIONS
    if operation.cursor
}
"""The field of an item that `after` takes, by method that returns pages; None if the method has no `after`."""
METHODS: Final[tuple[str, ...]] = tuple(dict.fromkeys(operation.method for operation in OPERATIONS))

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


def sends_key(method: str, arguments: Mapping[str, Any]) -> bool:
    """Whether a client sends a key with this call."""
    return method in SENDS_KEY or (method == "update_attempt" and "metadata" in arguments)


# -- calls in batches: the methods as the contract has them ----------------------------------------------------------


def _call_type(method: str) -> type[Struct]:
    names = list(parameters_of(method))
    arguments = msgspec.defstruct(
        f"{_camel(method)}Arguments", _fields(method, names, rest=False), kw_only=True, forbid_unknown_fields=True
    )
    fields: list[Any] = [("arguments", arguments), ("key", str | None, None)]
    return msgspec.defstruct(f"{_camel(method)}Call", fields, tag_field="method", tag=method, kw_only=True)


CALLS: Final[dict[str, type[Struct]]] = {
    method: _call_type(method) for method in (*METHODS, "enqueue_rollout", "dequeue_rollout")
}
"""The type of a call of each method, in `POST /v1/agl/calls`."""


def result_type(method: str) -> Any:
    """The type of a call's result. A span that was stored as sent is represented by its sequence_id."""
    if method == "add_span":
        return int | Span
    if method == "add_many_spans":
        return list[int | Span]
    return hints_of(method)["return"]


RESULTS: Final = {method: result_decoder(result_type(method)) for method in CALLS}


def call_decoder() -> Any:
    """A function that decodes a call of any method."""
    return decoder(_union(list(cast("Any", CALLS.values()))))
