"""The one table of what a store's server offers: which method of the contract is reached by which verb and path.

Everything else follows from the signatures and docstrings of the contract (base.py): what a request holds, what is
answered, the routes (routes.py), the calls of a client (client.py), and the OpenAPI document (openapi.py). Paths and
names are those of the 0.x store's REST API where it has them.
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
from agentlightning.store.base import LightningStoreBase, Unset
from agentlightning.store.http.encoding import BODIES, INPUTS, Integer, RolloutBody, decoder, result_reader


@dataclass(frozen=True)
class Operation:
    """One way to reach a method of the contract."""

    method: str
    verb: Literal["GET", "POST", "PUT", "DELETE"]
    path: str
    """Under /v1/agl; names in braces are parameters of the method."""
    status: int = 200
    whole: str | None = None
    """The parameter that is the whole body."""
    query: tuple[str, ...] = ()
    """Parameters given in the query string where there is a body too."""
    names: Mapping[str, str] = field(default_factory=dict[str, str])
    """Other names of parameters in the request."""
    present: tuple[str, ...] = ()
    """Parameters whose value is not null where they are given."""
    pages: str | None = None
    """The answer is a page of a list: {items, limit, offset, total}. The field of an item that `after` takes."""
    attempts: bool = False
    """Each rollout of the answer comes with its latest attempt, where it has one."""
    scalar: str | None = None
    """The answer is an object with this one field."""
    absent: bool = False
    """None is an answer, not a 404."""
    single: str | None = None
    """A path parameter that is the only item of the list the method takes, and that list's name."""

    @property
    def waits(self) -> bool:
        """It may take as long as its `timeout` says."""
        return "timeout" in self.parameters

    @cached_property
    def parameters(self) -> dict[str, inspect.Parameter]:
        return parameters_of(self.method)

    @cached_property
    def path_names(self) -> tuple[str, ...]:
        return tuple(re.findall(r"{(\w+)}", self.path))

    @cached_property
    def request(self) -> type[Struct]:
        """What a request holds beside its path: the query of a GET, else the body."""
        taken = {*self.path_names, self.whole, self.single, *self.query}
        return _request(self, [name for name in self.parameters if name not in taken])

    @cached_property
    def query_request(self) -> type[Struct]:
        """The query string of a request that has a body too."""
        return _request(self, list(self.query))

    @cached_property
    def body(self) -> Any:
        """The type of the whole body; None where there is none."""
        if self.verb in ("GET", "DELETE"):
            return None
        if self.whole is not None:
            return _shape(hints_of(self.method)[self.whole], rest=True)
        return self.request if self.request.__struct_fields__ else None

    @cached_property
    def read(self) -> Any:
        return decoder(self.body)

    @cached_property
    def empty_is_allowed(self) -> bool:
        """Nothing in the body has to be given."""
        return self.body is None or (self.whole is None and not _required(self.request))

    @cached_property
    def answer(self) -> Any:
        """The type of the answer's body."""
        result = _shape(hints_of(self.method)["return"], rest=True)
        if self.method == "statistics":
            result = dict[str, int | float | str]
        if self.attempts:
            result = list[RolloutBody] if self.pages else RolloutBody
        if self.pages:
            return _page_type(result)
        if self.scalar:
            return _scalar_type(self.scalar, result)
        if not self.absent and get_origin(result) in (Union, types.UnionType):
            return _union([each for each in get_args(result) if each is not type(None)])
        return result

    def arguments(self, request: Struct) -> dict[str, Any]:
        """The method's arguments out of a request; what was not given is left out."""
        found: dict[str, Any] = {}
        for name in request.__struct_fields__:
            value = getattr(request, name)
            if value is not UNSET:
                found[name] = value
        return found


@lru_cache
def _page_type(items: Any) -> type[Struct]:
    name = get_args(items)[0].__name__.removesuffix("Body")
    fields: list[Any] = [("items", items), ("limit", int), ("offset", int), ("total", int)]
    return msgspec.defstruct(f"PageOf{name}", fields, kw_only=True)


@lru_cache
def _scalar_type(name: str, kind: Any) -> type[Struct]:
    return msgspec.defstruct(_camel(name), [(name, kind)], kw_only=True)


def _camel(name: str) -> str:
    return "".join(part.title() for part in name.split("_"))


def parameters_of(method: str) -> dict[str, inspect.Parameter]:
    """Of a method of the contract, without `self`."""
    found = dict(inspect.signature(getattr(LightningStoreBase, method)).parameters)
    del found["self"]
    return found


def hints_of(method: str) -> dict[str, Any]:
    return get_type_hints(getattr(LightningStoreBase, method))


def _request(operation: Operation, names: list[str]) -> type[Struct]:
    paged = operation.pages is not None
    names = [name for name in names if not (paged and name in ("limit", "offset"))]
    fields = [_without_null(item, operation.present) for item in _fields(operation.method, names, rest=True)]
    if paged:
        fields += _PAGE
    return msgspec.defstruct(
        _camel(operation.method) + "Request",
        fields,
        rename=dict(operation.names) or None,
        kw_only=True,
        forbid_unknown_fields=True,
    )


def _without_null(item: tuple[Any, ...], names: Sequence[str]) -> tuple[Any, ...]:
    """A field whose value, where it is given, is not null."""
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
        shape, given = _shape(hints[name], rest), parameters[name].default
        if given is inspect.Parameter.empty:
            fields.append((name, shape))
        else:  # the default is the contract's own, so that it is not sent and not stated again
            fields.append((name, _union([shape, UnsetType]), UNSET))
    return fields


def _required(request: type[Struct]) -> bool:
    return any(item.required for item in msgspec.structs.fields(request))


def _shape(kind: Any, rest: bool) -> Any:
    """A type of the contract as a type that msgspec reads."""
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
        return list[_shape(inner[0], rest)]  # Sequence and list: JSON has one of them
    return kind


def _union(kinds: Sequence[Any]) -> Any:
    return Union[tuple(kinds)]  # noqa: UP007  made at run time


def _search(method: str, path: str, cursor: str, attempts: bool = False) -> tuple[Operation, ...]:
    """A list by query string and, for long filters, by body."""
    return (
        Operation(method, "GET", path, pages=cursor, attempts=attempts),
        Operation(method, "POST", f"{path}/search", pages=cursor, attempts=attempts),
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
    *_search("query_rollouts", "/rollouts", "rollout_id", attempts=True),
    Operation("count_rollouts", "POST", "/counts/rollouts", scalar="count"),
    Operation("get_rollout_by_id", "GET", _rollout, attempts=True),
    Operation("update_rollout", "POST", _rollout),
    *_search("query_attempts", f"{_rollout}/attempts", "attempt_id"),
    Operation("get_latest_attempt", "GET", f"{_rollout}/attempts/latest", absent=True),
    Operation("update_attempt", "POST", f"{_rollout}/attempts/{{attempt_id}}"),
    Operation("get_latest_attempts", "POST", "/attempts/latest"),
    Operation("get_attempt", "GET", "/attempts/{attempt_id}"),
    # spans
    Operation("add_span", "POST", "/spans", 201, whole="span"),
    Operation("add_many_spans", "POST", "/spans/batch", 201),
    *_search("query_spans", "/spans", "span_id"),
    Operation("get_next_span_sequence_id", "POST", "/spans/next", scalar="sequence_id"),
    Operation("get_many_span_sequence_ids", "POST", "/spans/next/batch", scalar="sequence_ids"),
    # resources
    Operation("query_resources", "GET", "/resources", pages="resources_id"),
    Operation("add_resources", "POST", "/resources", 201, whole="resources", query=("resources_id",)),
    Operation("add_resources", "PUT", "/resources/{resources_id}", 201, whole="resources"),
    Operation("get_latest_resources", "GET", "/resources/latest", absent=True),
    Operation("get_resources_by_id", "GET", "/resources/{resources_id}"),
    Operation("update_resources", "POST", "/resources/{resources_id}", whole="resources"),
    Operation("delete_resources", "DELETE", "/resources/{resources_id}", scalar="count"),
    # workers and queues
    *_search("query_workers", "/workers", "worker_id"),
    Operation("get_worker", "GET", "/workers/{worker_id}", absent=True),
    Operation("update_worker", "POST", "/workers/{worker_id}", names={"stats": "heartbeat_stats"}, present=("stats",)),
    Operation("query_queues", "GET", "/queues"),
    Operation("update_queue", "POST", "/queues/{name}"),
    # keeping the store small
    Operation("statistics", "GET", "/statistics"),
    Operation("read_records", "POST", "/records/read"),
    Operation("add_records", "POST", "/records", 201, scalar="count"),
    Operation("delete_rollouts", "POST", "/records/delete", scalar="count"),
    Operation("delete_rollouts", "DELETE", _rollout, scalar="count", single="rollout_ids"),
    Operation("prune", "POST", "/prune"),
    Operation("vacuum", "POST", "/vacuum"),
)

METHODS: Final[tuple[str, ...]] = tuple(dict.fromkeys(operation.method for operation in OPERATIONS))

ALONE: Final = frozenset({"statistics", "prune", "vacuum", "read_records", "add_records", "delete_rollouts"})
"""Methods that may take long, so that a client sends them in a request of their own."""
KEYED: Final = frozenset(
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
"""Methods whose repetition is not harmless by nature: a client sends a key, under which the store remembers the answer.
`update_attempt` is one of them where it sets metadata, which somebody else may have set again meanwhile."""
ONCE: Final = KEYED | {
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
"""Methods that are done once where a key is given: each is one transaction. Repeating any other does no harm."""


def is_keyed(method: str, arguments: Mapping[str, Any]) -> bool:
    """Whether a client sends a key with a call."""
    return method in KEYED or (method == "update_attempt" and "metadata" in arguments)


# -- calls: the contract as it is ------------------------------------------------------------------------------------


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
"""One call of a method, as `POST /v1/agl/calls` takes many of."""


def result_type(method: str) -> Any:
    """What a call answers. Spans are told by their sequence_id alone where they were kept as they were sent."""
    if method == "add_span":
        return int | Span
    if method == "add_many_spans":
        return list[int | Span]
    return hints_of(method)["return"]


RESULTS: Final = {method: result_reader(result_type(method)) for method in CALLS}


def call_reader() -> Any:
    """Reads one call of any method."""
    return decoder(_union(list(cast("Any", CALLS.values()))))
