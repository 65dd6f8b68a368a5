"""Forwards calls of the store contract to a server: encodes the arguments, reads lists page by page.

The methods are generated from the operation table (operations.py). Type checkers and editors see the signatures of the
contract.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, Final

from msgspec import Raw

from agentlightning.errors import ConfigError
from agentlightning.store.base import LightningStoreBase
from agentlightning.store.http.client.transport import ClientTransport
from agentlightning.store.http.encoding import encode, to_wire
from agentlightning.store.http.operations import CALLS, CURSORS, RESULTS, SLOW, parameters_of, sends_key
from agentlightning.store.ids import new_hex, new_id
from agentlightning.store.paging import PageSizer
from agentlightning.store.types import UNSET

SLOW_CALL_SECONDS: Final = 3600.0
"""How much longer than others a call of a slow method may take."""
FIRST_PAGE: Final = 64
"""Items that are read at first, before it is known how large they are."""
GENERATED_IDS: Final[Mapping[str, Mapping[str, str]]] = {
    "start_rollout": {"rollout_id": "ro", "claim_id": "cl"},
    "enqueue_rollout": {"rollout_id": "ro"},
    "start_attempt": {"claim_id": "cl"},
    "add_resources": {"resources_id": "rs"},
}
"""Ids that the client generates when the caller gives none, so that a repeated call has the same ones: their prefixes
by method and argument."""


class ForwardingStore(LightningStoreBase):
    """A store whose methods send their arguments to a server. A subclass gets every method of the contract that it does
    not define itself."""

    _transport: ClientTransport

    def __init_subclass__(cls) -> None:
        for name in CALLS.keys() - vars(cls).keys():
            setattr(cls, name, cls._forwarder(name))

    @staticmethod
    def _forwarder(name: str) -> Callable[..., Any]:
        parameters = parameters_of(name)
        bind = inspect.Signature(list(parameters.values())).bind
        defaults = {argument: each.default for argument, each in parameters.items()}
        ids, paged = GENERATED_IDS.get(name, {}), name in CURSORS

        async def forward(self: ForwardingStore, *positional: Any, **keywords: Any) -> Any:
            arguments = bind(*positional, **keywords).arguments
            for argument, prefix in ids.items():
                if arguments.get(argument) is None:
                    arguments[argument] = new_id(prefix)
            if paged:
                return await self._read_pages(name, arguments, defaults)
            return await self._call(name, arguments)

        functools.update_wrapper(forward, getattr(LightningStoreBase, name), updated=())  # it must not be abstract
        return forward

    async def _call(self, method: str, arguments: Mapping[str, Any]) -> Any:
        return await self._send(method, _encoded(arguments))

    async def _send(self, method: str, arguments: dict[str, Any]) -> Any:
        """Send a call whose arguments are already encoded."""
        return RESULTS[method](await self._answer(method, arguments))

    async def _answer(self, method: str, arguments: dict[str, Any]) -> Raw:
        transport = self._transport.for_running_loop()
        body = _call_body(method, arguments)
        if method in SLOW:
            return await transport.call_unbatched(body, SLOW_CALL_SECONDS)
        return await transport.call(body)

    async def _call_and_wait(self, method: str, timeout: float, arguments: Mapping[str, Any]) -> Any:
        """Send a call that the server may hold for up to `timeout` seconds until there is a result."""
        body = _call_body(method, _encoded({**arguments, "timeout": timeout}))
        transport = self._transport.for_running_loop()
        return RESULTS[method](await transport.call_unbatched(body, timeout, "/waits/calls"))

    async def _read_pages(self, method: str, arguments: dict[str, Any], defaults: Mapping[str, Any]) -> list[Any]:
        """Read a list in calls of limited size. Arguments that have their default are left out."""
        limit, offset = arguments.pop("limit", -1), arguments.pop("offset", 0)
        after = arguments.pop("after", None)
        if limit < 0 and limit != -1:
            raise ConfigError(f"limit={limit} is not a number of items; use -1 for all of them")
        filters = {name: value for name, value in arguments.items() if value != defaults[name]}
        # Pages continue after the last item if the order is that of creation, else by offset.
        cursor = None if filters.keys() & {"sort_by", "sort_order"} else CURSORS[method]
        sizer, items = PageSizer(first=FIRST_PAGE), list[Any]()
        position: dict[str, Any] = {"offset": offset} | ({} if after is None else {"after": after})
        while True:
            wanted = sizer.items if limit == -1 else min(sizer.items, limit - len(items))
            answer = await self._answer(method, _encoded({**filters, **position, "limit": wanted}))
            page = RESULTS[method](answer)
            sizer.record(len(page), len(memoryview(answer)))
            items += page
            if len(page) < wanted or len(items) == limit:
                return items
            position = {"offset": offset + len(items)} if cursor is None else {"after": getattr(page[-1], cursor)}


def _encoded(arguments: Mapping[str, Any]) -> dict[str, Any]:
    return {name: to_wire(value, name) for name, value in arguments.items() if value is not UNSET}


def _call_body(method: str, arguments: dict[str, Any]) -> bytes:
    """The JSON of one call. Raises ConfigError for a value that JSON cannot hold."""
    call: dict[str, Any] = {"method": method, "arguments": arguments}
    if sends_key(method, arguments):
        call["key"] = new_hex() + new_hex()
    try:
        return encode(call)
    except UnicodeEncodeError as error:
        raise ConfigError(f"{error.object!r} holds half a surrogate pair, which no database can store") from None
