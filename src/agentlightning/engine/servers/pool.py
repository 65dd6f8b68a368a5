"""An engine made of model servers: one, or several of the same model that stand in for one another.

Responsible for which server draws an answer, for what happens when one fails, and for all of them having the same
weights. Calls of one affinity go to one server, whose cache knows their history. A server that fails is taken out,
looked after and let in again once it is healthy and has the newest weights; what it was drawing goes on at another,
from the last token that came. It never trains, and never decides when weights change: `policy.served` does.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from agentlightning.chat.base import ChatFormat
from agentlightning.engine.base import ConstraintKind, Sample, SamplingParams
from agentlightning.engine.servers.base import BackendError, End, Run, Served
from agentlightning.engine.servers.replica import Adapter, Child, OnDisk, Patience, Replica, Source, Transfer, Weights
from agentlightning.engine.servers.resumable import Drawing, Stopped, UnknownWeightsError
from agentlightning.errors import ConfigError, ContextLengthError, PolicyError, ServerError
from agentlightning.transport import Transport
from agentlightning.util.rendezvous_hash import weight

log = logging.getLogger(__name__)

FIRST_PAUSE, LONGEST_PAUSE = 0.1, 5.0
"""Seconds between two looks at a server that is out."""
MOST_SCHEMAS = 1000
"""It is remembered of so many whether servers can hold to them."""
MISSED = 3
"""So many looks in a row have to fail before a server gets no new answers."""
STALLED_SECONDS = 30.0
"""After so long without a sign of life what it was drawing is drawn elsewhere."""


class Replicas:
    """An `Engine` over `replicas`. Make it with `Replicas.open`, in the event loop that uses it."""

    def __init__(
        self,
        replicas: Sequence[Replica],
        served: Sequence[Served],
        chat: ChatFormat,
        transport: Transport,
        *,
        model: str | None = None,
        max_context: int | None = None,
        patience: Patience | None = None,
    ) -> None:
        self.model = model or served[0].model
        self.chat = chat
        self.context_length = min([each.context_length for each in served] + ([max_context] if max_context else []))
        self.replicas = list(replicas)
        self._served = served[0].model
        self._transport = transport
        self._patience = patience or Patience()
        self._version = 0
        self._weights: Weights | None = None
        self._labels = {replica.label: 0 for replica in replicas if replica.label is not None}
        """Label -> version, of the weights that may draw."""
        self._prefix = secrets.token_hex(4)
        self._pushes = 0
        self._adapters: dict[str, Adapter] = {}
        self._schemas: dict[str, bool] = {}
        """JSON schema or grammar -> whether the servers hold answers to it."""
        self._changing = asyncio.Lock()
        """Held while weights or adapters change."""
        self._some_up = asyncio.Event()
        self._some_up.set()
        self._closed = False
        self._watch = asyncio.create_task(self._look_after(), name="model servers")

    @classmethod
    async def open(
        cls,
        replicas: Sequence[Replica],
        chat: ChatFormat,
        transport: Transport,
        *,
        model: str | None = None,
        max_context: int | None = None,
        patience: Patience | None = None,
        weights_change: bool = False,
    ) -> Replicas:
        """Join servers that are running. `model` is the name agents ask for (default: as the servers call it),
        `max_context` the most tokens of prompt and answer; with `weights_change` their weights will be replaced.

        Raises ConfigError where they do not serve one model, or not as we need it, BackendError where one does not
        answer. `transport` is closed with the engine."""
        if not replicas:
            raise ConfigError("no model server: give the address of at least one")
        served = [await replica.backend.served() for replica in replicas]
        if len({each.model for each in served}) > 1:
            names = ", ".join(f"{r.backend.url}: {each.model}" for r, each in zip(replicas, served, strict=True))
            raise ConfigError(f"the servers serve different models ({names}); give them one --served-model-name")
        for replica in replicas:
            await replica.backend.check(weights_change=weights_change)
            replica.label = await replica.backend.label()
        return cls(replicas, served, chat, transport, model=model, max_context=max_context, patience=patience)

    @property
    def policy_version(self) -> int:
        return self._version

    @property
    def supported_params(self) -> frozenset[str]:
        """What of `DISTRIBUTION_PARAMS` all servers draw with."""
        return frozenset[str].intersection(*(replica.backend.supported_params for replica in self.replicas))

    async def can_enforce(self, text: str, kind: ConstraintKind = "json_schema") -> bool:
        """See `Engine.can_enforce`. Found out by drawing a token, once for each schema or grammar."""
        if kind not in self.supported_params:
            return False
        if text not in self._schemas:
            if len(self._schemas) >= MOST_SCHEMAS:
                self._schemas.clear()
            params = replace(SamplingParams(temperature=0.0, max_tokens=1), **{kind: text})
            try:
                await self.sample(self.chat.encode("{"), params)
                self._schemas[text] = True
            except ConfigError:
                self._schemas[text] = False
        return self._schemas[text]

    @property
    def busy(self) -> int:
        """Answers being drawn."""
        return sum(len(replica.draws) for replica in self.replicas)

    # -- drawing ---------------------------------------------------------------------------------------------------

    async def sample(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        on_tokens: Callable[[Sequence[int]], None] | None = None,
        *,
        affinity: str = "",
    ) -> Sample:
        """See `Engine.sample`. Raises ConfigError for params the servers cannot draw with, PolicyError where the
        servers failed more often than a call is repeated."""
        return await self._sample(self._served, prompt_token_ids, params, on_tokens, affinity)

    async def sample_adapter(
        self,
        name: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        on_tokens: Callable[[Sequence[int]], None] | None = None,
        affinity: str = "",
    ) -> Sample:
        """`sample` from the adapter of that name; versions are the adapter's."""
        version = self.adapter_version(name)
        sample = await self._sample(name, prompt_token_ids, params, on_tokens, affinity)
        return replace(sample, policy_version=version, versions=())

    async def sample_from(self, replica: Replica, prompt: Sequence[int], params: SamplingParams) -> Sample:
        """Drawn by that server and no other. Raises as `Backend.draw` does."""
        drawing = self._begin(prompt, params, None)
        end = await self._draw(replica, self._served, drawing)
        return drawing.sample(end.finish_reason, replica.version)

    def adapter_version(self, name: str) -> int:
        """0 for an adapter as first loaded. Raises ConfigError where none of the name is loaded."""
        if (adapter := self._adapters.get(name)) is None:
            raise ConfigError(f"no adapter {name!r} is loaded; loaded are {sorted(self._adapters) or 'none'}")
        return adapter.version

    async def _sample(
        self,
        model: str,
        prompt: Sequence[int],
        params: SamplingParams,
        on_tokens: Callable[[Sequence[int]], None] | None,
        affinity: str,
    ) -> Sample:
        drawing = self._begin(prompt, params, on_tokens)
        tried: list[Replica] = []
        while (reason := drawing.reason) is None:
            replica = await self._choose(affinity, tried)
            tried.append(replica)
            try:
                end = await self._draw(replica, model, drawing)
                return drawing.sample(end.finish_reason, replica.version)
            except BackendError as error:
                if not error.again or not drawing.goes_on or len(tried) > self._patience.retries:
                    raise
                self._suspect(replica, str(error))
        return drawing.sample(reason, self._version)

    def _begin(
        self, prompt: Sequence[int], params: SamplingParams, on_tokens: Callable[[Sequence[int]], None] | None
    ) -> Drawing:
        room = self._room(prompt)
        limit = min(room, params.max_tokens or room)
        return Drawing(prompt, params, limit, params.end_tokens(self.chat.eos_token_ids), self.chat.decode, on_tokens)

    def _room(self, prompt: Sequence[int]) -> int:
        if not prompt:
            raise PolicyError("the prompt has no tokens; give at least one")
        if len(prompt) >= self.context_length:
            raise ContextLengthError(
                f"the prompt has {len(prompt)} tokens and the context holds {self.context_length}, which leaves no "
                "room for an answer; shorten the prompt, or use a model with a longer context"
            )
        return self.context_length - len(prompt)

    async def _draw(self, replica: Replica, model: str, drawing: Drawing) -> End:
        def receive(run: Run) -> None:
            drawing.receive(run, replica.version)

        ask, stream, labels = drawing.ask(model, model != self._served), drawing.watched, self._labels
        task = asyncio.ensure_future(replica.backend.draw(ask, receive, stream=stream))
        replica.draws.add(task)
        try:
            end = await task
            drawing.learn(end, {**labels, **self._labels})
            return end
        except Stopped:
            return End("stop")
        except UnknownWeightsError as error:
            self._take_out(replica, f"it draws with weights that were not given to it ({error})")
            message = f"{replica.backend.url} drew with weights that were not given to it ({error})"
            raise BackendError(message, again=drawing.take_back()) from None
        except asyncio.CancelledError:
            current = asyncio.current_task()
            if current is not None and current.cancelling():
                raise
            raise BackendError(f"{replica.backend.url} was taken out: {replica.why}", again=True) from None
        finally:
            replica.draws.discard(task)

    async def _choose(self, affinity: str, tried: Sequence[Replica]) -> Replica:
        """A server that is up, rather one that has not failed this call. Raises PolicyError where none is in time."""
        try:
            async with asyncio.timeout(self._patience.wait_seconds):
                while not (up := [replica for replica in self.replicas if replica.up]):
                    await self._some_up.wait()
        except TimeoutError:
            reasons = "; ".join(f"{replica.backend.url}: {replica.why}" for replica in self.replicas)
            raise PolicyError(f"no model server was up for {self._patience.wait_seconds:g} s ({reasons})") from None
        fresh = [replica for replica in up if replica not in tried] or up
        if affinity:
            return max(fresh, key=lambda replica: weight(affinity, replica.backend.url))
        return min(fresh, key=lambda replica: len(replica.draws))

    # -- weights and adapters --------------------------------------------------------------------------------------

    async def push(self, weights: Path | Source, version: int) -> None:
        """Give all servers these weights: those in a directory, which they read themselves, or those of a source.
        Returns when all that are up have them; the others get them before they draw again, from the disk. Raises
        PolicyError where none can be brought to take them."""
        source = OnDisk(weights) if isinstance(weights, Path) else weights
        async with self._changing:
            # A label of its own each time: weights that were gone back to, and what followed, are not the same again.
            self._pushes += 1
            self._weights = given = Weights(source, version, f"{self._prefix}-{self._pushes}")
            # Weights that were not given to it are those of a server that was started again.
            self._labels = {label: known for label, known in self._labels.items() if label.startswith(self._prefix)}
            self._labels[given.label] = version
            await asyncio.gather(*(self._give(replica) for replica in self.replicas if replica.up))
            self._version = version
        await self._choose("", ())

    async def _give(self, replica: Replica) -> None:
        transfer = replica.transfer if replica.transfer is not None and replica.transfer.usable else None
        try:
            await self._load(replica, transfer)
        except (PolicyError, ConfigError) as error:
            # It may hold half of each: nobody draws there until it has the new ones.
            self._take_out(replica, str(error))
            if transfer is not None and not transfer.usable:
                log.warning("model server %s gets its weights from the disk from now on", replica.backend.url)

    async def _load(self, replica: Replica, transfer: Transfer | None = None) -> None:
        weights = self._weights
        if weights is None:
            return

        def ready() -> None:
            replica.version = weights.version

        if transfer is not None and weights.source.lend is not None:
            replica.torn = True
            await transfer.give(weights, weights.source.lend, ready)
        else:
            await replica.backend.load(await weights.source.directory(), weights.label, ready)
        replica.torn = False
        replica.label = await replica.backend.label()
        if replica.label not in (None, weights.label):
            raise BackendError(f"{replica.backend.url} has weights {replica.label}, not {weights.label}", again=True)

    async def load_adapter(self, name: str, directory: Path) -> AdapterEngine:
        """Let all servers serve the LoRA adapter in `directory` as `name`; again with another directory, its newer
        version. A server that fails draws nothing until it has it. Raises PolicyError or ConfigError where all do."""
        async with self._changing:
            known = self._adapters.get(name)
            adapter = Adapter(Path(directory), known.version + 1 if known else 0)
            up = [replica for replica in self.replicas if replica.up]
            loads = (self._load_adapter(replica, name, adapter) for replica in up)
            errors = [error for error in await asyncio.gather(*loads) if error is not None]
            if errors and len(errors) == len(up):
                raise errors[0]
            self._adapters[name] = adapter
            for replica in up:
                if replica.adapters.get(name) != adapter.version:
                    self._take_out(replica, f"it could not load the adapter {name}: {errors[0]}")
        return AdapterEngine(self, name)

    async def unload_adapter(self, name: str) -> None:
        """The servers forget the adapter. Raises ConfigError where there is none of the name."""
        async with self._changing:
            self.adapter_version(name)
            del self._adapters[name]
            holding = [replica for replica in self.replicas if replica.adapters.pop(name, None) is not None]
            await asyncio.gather(*(replica.backend.unload_adapter(name) for replica in holding if replica.up))

    async def _load_adapter(self, replica: Replica, name: str, adapter: Adapter) -> PolicyError | ConfigError | None:
        """The error, if it failed."""
        try:
            await replica.backend.load_adapter(name, adapter.directory)
        except (BackendError, ConfigError) as error:
            return error
        replica.adapters[name] = adapter.version
        return None

    # -- health ----------------------------------------------------------------------------------------------------

    async def _look_after(self) -> None:
        while True:
            await asyncio.sleep(self._patience.health_seconds)
            await asyncio.gather(*(self._look(replica) for replica in self.replicas if replica.up))

    async def _look(self, replica: Replica) -> None:
        if replica.child is not None and replica.child.ended:
            return self._take_out(replica, "its process ended")
        try:
            await replica.backend.health()
            replica.missed = 0
            label = replica.label if self._changing.locked() else await replica.backend.label()
        except (BackendError, ConfigError) as error:
            replica.missed += 1
            if replica.missed >= MISSED:
                self._suspect(replica, str(error))
            return
        if replica.up and label != replica.label and not self._changing.locked():
            self._take_out(replica, f"it has weights {label}, not {replica.label}: it was started again")

    def _suspect(self, replica: Replica, why: str) -> None:
        """No new answers for it until it has been looked at; what it is drawing goes on."""
        if replica.up and not self._closed:
            log.warning("model server %s failed: %s", replica.backend.url, why)
            replica.up, replica.why, replica.missed = False, why, 0
            self._note()
            replica.recovery = asyncio.create_task(self._recover(replica))

    def _take_out(self, replica: Replica, why: str) -> None:
        """As `_suspect`, and what it is drawing is drawn elsewhere."""
        self._suspect(replica, why)
        if replica.transfer is not None:
            replica.transfer.courier.abort()
        replica.version, replica.label, replica.why = -1, None, why
        self._drop(replica)

    def _drop(self, replica: Replica) -> None:
        for task in list(replica.draws):
            task.cancel()

    def _note(self) -> None:
        if any(replica.up for replica in self.replicas):
            self._some_up.set()
        else:
            self._some_up.clear()

    async def _recover(self, replica: Replica) -> None:
        """Until it is healthy and has what the others have."""
        pause, since = FIRST_PAUSE, time.monotonic()
        while True:
            try:
                # What waits for the rest of a transfer may wait for ever: better a new one.
                if replica.child is not None and (replica.child.ended or replica.torn):
                    await self._restart(replica, replica.child)
                await replica.backend.health()
                if replica.torn and replica.transfer is not None:
                    await replica.transfer.receiver.forget_half()
                async with self._changing:
                    await self._catch_up(replica)
                    replica.up = True
                break
            except (PolicyError, ConfigError, ServerError, OSError) as error:  # OSError: of a server's log, say.
                replica.why = str(error)
            if time.monotonic() - since > STALLED_SECONDS:
                self._drop(replica)
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)
        log.info("model server %s is back", replica.backend.url)
        self._note()

    async def _restart(self, replica: Replica, child: Child) -> None:
        replica.adapters.clear()
        replica.version, replica.label = -1, None
        await child.restart(await self._weights.source.directory() if self._weights else None)
        replica.torn = False

    async def _catch_up(self, replica: Replica) -> None:
        label = await replica.backend.label()
        if self._weights is None:
            replica.version, replica.label = 0, label
            if label is not None:
                self._labels.setdefault(label, 0)
        elif replica.version != self._weights.version or label not in (None, self._weights.label):
            await self._load(replica)
        present = (await replica.backend.served()).adapters if self._adapters else frozenset[str]()
        for name, adapter in self._adapters.items():
            if replica.adapters.get(name) != adapter.version or name not in present:
                await replica.backend.load_adapter(name, adapter.directory)
                replica.adapters[name] = adapter.version

    async def close(self) -> None:
        """Stop looking after the servers, end those we started, close the connections. Safe to call twice."""
        if self._closed:
            return
        self._closed = True
        tasks = [self._watch, *(replica.recovery for replica in self.replicas if replica.recovery)]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for transfer in filter(None, (replica.transfer for replica in self.replicas)):
            transfer.courier.abort()
        await asyncio.gather(*(replica.child.close() for replica in self.replicas if replica.child))
        await self._transport.close()


@dataclass(frozen=True, slots=True)
class AdapterEngine:
    """A LoRA adapter on the servers, as an engine of its own."""

    replicas: Replicas
    model: str

    @property
    def context_length(self) -> int:
        return self.replicas.context_length

    @property
    def chat(self) -> ChatFormat:
        return self.replicas.chat

    @property
    def supported_params(self) -> frozenset[str]:
        return self.replicas.supported_params

    async def can_enforce(self, text: str, kind: ConstraintKind = "json_schema") -> bool:
        """See `Engine.can_enforce`."""
        return await self.replicas.can_enforce(text, kind)

    @property
    def policy_version(self) -> int:
        """How many times newer versions of the adapter were loaded."""
        return self.replicas.adapter_version(self.model)

    async def sample(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        on_tokens: Callable[[Sequence[int]], None] | None = None,
        *,
        affinity: str = "",
    ) -> Sample:
        """See `Engine.sample`. Raises ConfigError once the adapter is unloaded."""
        return await self.replicas.sample_adapter(self.model, prompt_token_ids, params, on_tokens, affinity)
