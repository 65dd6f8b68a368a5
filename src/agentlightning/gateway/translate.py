"""A call whose provider speaks another dialect: read as one of ours, asked in the provider's, answered in the caller's.

`/v1/messages` and `/v1/responses` go to servers of chat completions, `/v1/chat/completions` and `/v1/responses` to
Anthropic's. Text and thoughts stream as they come, a tool call once it is whole. `previous_response_id` works as with
our own engines: the history is kept here and sent whole. What is recorded is what the provider was asked and answered.
Sending, repeating and hanging up are those of `gateway.forward`.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import orjson

from agentlightning import span as names
from agentlightning.gateway.attribution import Caller
from agentlightning.gateway.backends import Call
from agentlightning.gateway.bodies import BODIES, given_params
from agentlightning.gateway.conversation import Prompt, extend_digest
from agentlightning.gateway.counters import Counters
from agentlightning.gateway.dialects import responses
from agentlightning.gateway.dialects.base import Dialect, Head, Reply, Request
from agentlightning.gateway.dialects.fields import forced_params
from agentlightning.gateway.failures import broken, without_secrets
from agentlightning.gateway.forward import Forward, Keep
from agentlightning.gateway.heard import READERS, Choice, Events, event_data, hear
from agentlightning.gateway.images import hide
from agentlightning.gateway.kept import Kept
from agentlightning.gateway.problems import Problem
from agentlightning.gateway.provider import Path, Provider
from agentlightning.gateway.routing import Route
from agentlightning.gateway.told import Told
from agentlightning.gateway.wire import Outlet
from agentlightning.policy.base import Message

_ASKED_INSTEAD: Final[tuple[Path, ...]] = ("chat/completions", "messages")
_UNTRANSLATED: Final = frozenset({"completions", "embeddings"})


class Translator:
    """Makes translations. `kept` holds what later requests may name."""

    def __init__(self, dialects: Mapping[Path, Dialect], kept: Kept, counters: Counters) -> None:
        self._dialects = dialects
        self._kept = kept
        self._counters = counters

    def translate(
        self,
        path: Path,
        route: Route,
        caller: Caller,
        asked: Mapping[str, Any],
        trace_id: str,
        resource: str = "",
        forced: Mapping[str, Any] | None = None,
    ) -> Translation:
        """`forced` is what the LLM resource of that name says of the sampling. Raises Problem 400 on what is no
        request, or what the provider cannot be asked."""
        provider = route.provider
        assert provider is not None
        instead = _path_for(path, provider)
        dialect = self._dialects[path]
        request = dialect.read(orjson.dumps(hide(asked)), self._kept.recall(caller.attempt))
        request = replace(request, asked=asked)
        self._counters.count_unknown(request.unknown)
        params = forced_params(request.params, resource, forced or {})
        body = BODIES[instead](request, provider, route.send_model, given_params(asked, params, forced or {}))
        head = Head(dialect.id_prefix + secrets.token_hex(12), route.name, int(time.time()), 0)
        return Translation(
            instead,
            route,
            caller,
            body,
            trace_id=trace_id,
            request=replace(request, params=params),
            head=head,
            reply=dialect.reply(replace(request, params=params), head),
            call_prefix=dialect.call_prefix,
            kept=self._kept,
        )


@dataclass(slots=True)
class Translation(Forward):
    """One call in another dialect than its provider's: `path` and `data` are the provider's."""

    request: Request = field(kw_only=True)
    head: Head = field(kw_only=True)
    reply: Reply = field(kw_only=True)
    call_prefix: str = field(kw_only=True)
    kept: Kept = field(kw_only=True)
    answers: list[Told] = field(default_factory=list[Told], init=False)

    async def _pass_whole(self, call: Call, keep: Keep, outlet: Outlet) -> None:
        self._hear_whole(call.body)
        self._settle(call)
        body = self.reply.whole(self.answers)
        await self._keep(keep, call)
        self._remember(body)
        await outlet.whole(200, body)

    async def _pass_stream(self, call: Call, keep: Keep, outlet: Outlet) -> None:
        events, ended, opened = Events(), False, False
        async for chunk in call.chunks():
            shown: list[bytes] = []
            for event in events.feed(chunk):
                ended |= self._hear_event(event)
                shown += [self.reply.piece(answer, piece) for answer in self._told() for piece in answer.news()]
            if shown:
                await outlet.write(b"".join(shown if opened else [self.reply.opening(self.answers), *shown]))
                opened = True
        self._check_whole(ended)
        self._settle(call)
        last = [self.reply.piece(answer, piece) for answer in self.answers for piece in answer.news(done=True)]
        opening = b"" if opened else self.reply.opening(self.answers)
        ending = opening + b"".join(last) + self.reply.ending(self.answers)
        await self._keep(keep, call)
        self._remember(None)
        await outlet.write(ending)
        await outlet.close()

    # -- hearing ---------------------------------------------------------------------------------------------------

    def _hear_whole(self, body: bytes) -> None:
        try:
            answer = orjson.loads(body)
        except orjson.JSONDecodeError as error:
            raise broken(self._provider, f"its answer is not JSON: {error}") from None
        hear(READERS[self.path], self.heard, answer)
        self._check_failed()
        if not self.heard.choices:
            raise broken(self._provider, "its answer holds no choice")
        for answer in self._told():
            answer.news(done=True)

    def _hear_event(self, event: bytes) -> bool:
        """Whether it was the last. Raises Problem where the provider says that it failed."""
        data = event_data(event)
        if data is None:
            if b"data:" in event and b"[DONE]" not in event:
                raise broken(self._provider, "an event of its stream is not JSON")
            return b"[DONE]" in event
        hear(READERS[self.path], self.heard, data)
        self._check_failed()
        return isinstance(data, dict) and data.get("type") == "message_stop"

    def _check_failed(self) -> None:
        """Raises Problem where the provider says, in the place of an answer, that it failed."""
        if self.heard.error is not None:
            message = f"the provider {self._provider.name!r} failed: {self.heard.error}"
            raise Problem(502, without_secrets(self._provider, message), code="provider_error", retry=False)

    def _told(self) -> Sequence[Told]:
        """The answers there are by now, in order."""
        for index in range(len(self.answers), max(self.heard.choices, default=-1) + 1):
            choice = self.heard.choices.setdefault(index, Choice(index))
            self.answers.append(Told(index, call_prefix=self.call_prefix, choice=choice))
        return self.answers

    @property
    def _provider(self) -> Provider:
        assert self.route.provider is not None
        return self.route.provider

    def _settle(self, call: Call) -> None:
        call.settle(self.heard.usage)
        if not self._told():
            self.heard.choice(0)
            self._told()
        if call.usage is not None:
            self.head.prompt_tokens = call.usage.input_tokens
            self.answers[0].received = call.usage.output_tokens

    # -- the record ------------------------------------------------------------------------------------------------

    def _attributes(self) -> dict[str, Any]:
        asked = {names.REQUEST_MODEL: self.request.model or self.route.name, names.RESPONSE_ID: self.head.id}
        return Forward._attributes(self) | asked

    def _choice_attributes(self, choice: Choice) -> dict[str, Any]:
        found = Forward._choice_attributes(self, choice)
        constraint = self.request.constraint
        if not constraint or choice.index >= len(self.answers):
            return found
        verdict, violations = constraint.judge(self.answers[choice.index])
        return found | {names.CONSTRAINT: verdict} | ({names.VIOLATIONS: violations} if violations else {})

    def _remember(self, body: bytes | None) -> None:
        """Keep what a later request may name."""
        attempt, reply = self.caller.attempt, self.reply
        if attempt is None or not isinstance(reply, responses.Reply):
            return
        stored = self.request.asked.get("store") is not False
        body = reply.whole(self.answers) if body is None else body
        self.kept.keep(
            attempt,
            self.head.id,
            Prompt([], digests=_digests(self.request.messages)),
            self.request.messages,
            self.answers[0].message,
            body if stored else None,
            reply.items if stored else (),
            self.request.leading,
        )


def _path_for(path: Path, provider: Provider) -> Path:
    """What the provider is asked instead. Raises Problem 400 where there is nothing."""
    for instead in _ASKED_INSTEAD:
        if path not in _UNTRANSLATED and provider.serves(instead):
            return instead
    message = f"the provider {provider.name!r} serves no /v1/{path}, and it cannot be put in other words"
    raise Problem(400, message, code="path_not_supported", param="model")


def _digests(messages: Sequence[Message]) -> tuple[bytes, ...]:
    digests = [b"agentlightning"]
    for message in messages:
        digests.append(extend_digest(digests[-1], message))
    return tuple(digests)
