"""One vLLM server: tokens in, tokens out, and the paths that replace its weights.

`VllmServer` is a `policy.backend.Backend`. Answers come from `/inference/v1/generate`, which names tokens by number
and says which weights drew them, where the server was started with `--enable-scale-out`; else from `/v1/completions`
with token ids. Log-probabilities are those of the distribution a token was drawn from only with
`--logprobs-mode processed_logprobs`: `check` finds out by drawing. Replacing weights needs `VLLM_SERVER_DEV_MODE=1`.
"""

from __future__ import annotations

import asyncio
import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import aclosing
from pathlib import Path
from typing import Any, Final

from agentlightning.engine.base import DISTRIBUTION_PARAMS, TERMINATION_PARAMS, SamplingParams
from agentlightning.engine.servers.base import Ask, BackendError, End, Http, Receive, Run, Served, Top, refusal
from agentlightning.errors import ConfigError
from agentlightning.transport import Transport
from agentlightning.weight_sync.base import Courier, Lend, TransferError

GENERATE: Final = "/inference/v1/generate"
COMPLETIONS: Final = "/v1/completions"
COLDEST: Final = 0.01
"""vLLM draws at no lower temperature but 0."""
IMPOSSIBLE: Final = -9999.0
"""How vLLM writes the log-probability of what cannot be drawn."""
LOAD_SECONDS: Final = 600.0
"""The longest a server may take to read its weights."""
_HELD: Final[Mapping[str, str]] = {"json_schema": "json", "grammar": "grammar"}
"""What an answer is held to, and how vLLM calls it."""
PROBE: Final = (1, 2, 3)
"""A prompt that every vocabulary holds."""


class VllmServer:
    """One vLLM server at `url` (without `/v1`) that serves `model`, by default the first it names.

    `token` is what it was started with as `--api-key`. A server that says nothing for `seconds` while it draws has
    failed."""

    supported_params: frozenset[str] = frozenset([*DISTRIBUTION_PARAMS, *TERMINATION_PARAMS])

    def __init__(
        self,
        transport: Transport,
        url: str,
        *,
        model: str | None = None,
        token: str | None = None,
        seconds: float = 600.0,
        connect_seconds: float = 10.0,
    ) -> None:
        self._http = Http(transport, url.removesuffix("/v1"), token, seconds=seconds, connect_seconds=connect_seconds)
        self._wanted = model
        self._generates: bool | None = None
        """Whether it has GENERATE; None: not known yet."""
        self._half = False
        """Whether it began to take weights and did not end."""

    @property
    def url(self) -> str:
        return self._http.url

    async def served(self) -> Served:
        cards: list[dict[str, Any]] = ((await self._http.get("/v1/models")) or {}).get("data", [])
        bases = [card for card in cards if not card.get("parent")]
        found = [card for card in bases if self._wanted in (None, card["id"])]
        if not found or "max_model_len" not in found[0]:
            names = ", ".join(str(card.get("id")) for card in bases) or "none"
            raise ConfigError(f"{self.url} does not serve {self._wanted or 'a model'}: it serves {names}")
        model = str(found[0]["id"])
        adapters = frozenset(str(card["id"]) for card in cards if card.get("parent") == model)
        return Served(model, int(found[0]["max_model_len"]), adapters)

    async def check(self, *, weights_change: bool) -> None:
        if weights_change:
            await self._go_on()
        ask = Ask((await self.served()).model, PROBE, SamplingParams(top_k=1), 4, frozenset())
        drawn: list[float] = []
        await self.draw(ask, lambda run: drawn.extend(run.logprobs), stream=False)
        # Of one token to choose from the log-probability is 0, unless it is that of another distribution.
        if any(logprob < -1e-6 for logprob in drawn):
            raise ConfigError(
                f"{self.url} answers log-probabilities that are not those of the distribution it draws from; start it "
                "with --logprobs-mode processed_logprobs"
            )

    async def health(self) -> None:
        await self._http.get("/health", seconds=5.0)

    # -- drawing ---------------------------------------------------------------------------------------------------

    async def draw(self, ask: Ask, receive: Receive, *, stream: bool) -> End:
        check(ask.params)
        if self._generates is None:
            self._generates = await self._knows_generate()
        wire = (GenerateWire if self._generates else CompletionsWire)(ask.params.top_logprobs)
        body = wire.body(ask, stream)
        try:
            if not stream:
                return self._take(wire, await self._http.post(wire.path, body), receive)
            return await self._follow(wire, body, receive)
        except BackendError as error:
            raise refusal(error, ask) from None

    async def _follow(self, wire: Wire, body: Mapping[str, Any], receive: Receive) -> End:
        end: End | None = None
        async with aclosing(self._http.events(wire.path, body)) as events:
            async for event in events:
                end = self._take(wire, event, receive) if wire.has_choice(event) or "error" in event else end
        if end is None:
            raise self._http.broken(wire.path, "its answer has no end")
        return end

    def _take(self, wire: Wire, answer: Any, receive: Receive) -> End:
        """Pass on what an answer, or an event of one, brings; the end, as far as it is known."""
        if not isinstance(answer, dict) or not wire.has_choice(answer):
            said = answer.get("error", answer) if isinstance(answer, dict) else answer
            raise self._http.broken(wire.path, f"no answer but {said!r:.300}")
        choice = answer["choices"][0]
        reason = choice.get("finish_reason")
        try:
            run, weights = wire.run(choice), wire.weights(choice)
        except (KeyError, TypeError, ValueError) as error:
            raise self._http.broken(wire.path, f"an answer that cannot be read ({error!r})") from error
        if run.token_ids:
            receive(run)
        if reason not in (None, "stop", "length"):
            raise self._http.broken(wire.path, f"the answer was ended by the server ({reason})")
        return End("length" if reason == "length" else "stop", weights)

    async def _knows_generate(self) -> bool:
        try:
            await self._http.post(GENERATE, {"token_ids": []}, seconds=10.0)
        except BackendError as error:
            if error.status in (400, 422):
                return True  # It found the prompt wanting, not the path.
            if error.status in (404, 405):
                return False
            raise
        return True

    # -- weights ---------------------------------------------------------------------------------------------------

    async def label(self) -> str | None:
        try:
            answer = await self._http.get("/weight_info")
        except BackendError as error:
            if error.status in (404, 405):
                return None
            raise
        return answer.get("weight_version") if isinstance(answer, dict) else None

    # In this order nothing is drawn by half-loaded weights, and no key or value outlives the weights it is of.

    async def load(self, directory: Path, label: str, ready: Callable[[], None]) -> None:
        await self._http.post("/pause?mode=keep", seconds=60.0)
        await self.forget_half()
        self._half = True
        await self._reload({"weights_path": str(directory)}, LOAD_SECONDS)
        self._half = False
        await self._set_label(label)
        await self._go_on_with_new(ready)

    async def join(self, courier: Courier) -> None:
        await self._ask_to_leave()  # What it still has of another run, or of a courier that broke.
        world = await self._http.get("/get_world_size")
        try:
            invitation = {"init_info": courier.invite(int(world["world_size"]))}
            asking = asyncio.create_task(
                self._http.post("/init_weight_transfer_engine", invitation, seconds=LOAD_SECONDS)
            )
            await _both(asking, courier)
        except (TransferError, BackendError) as error:
            if isinstance(error, BackendError) and error.status in (404, 500):
                raise ConfigError(
                    f"{self.url} does not take weights in this way ({error}); start it with --weight-transfer-config, "
                    'or use transfer = "disk"'
                ) from error
            raise BackendError(f"{self.url}: {error}", again=True) from error

    async def receive(self, courier: Courier, lend: Lend, label: str, ready: Callable[[], None]) -> None:
        loop = asyncio.get_running_loop()

        def tell(info: dict[str, Any]) -> Future[Any]:
            call = self._http.post("/update_weights", {"update_info": info}, seconds=LOAD_SECONDS)
            return asyncio.run_coroutine_threadsafe(call, loop)

        await self._http.post("/pause?mode=keep", seconds=60.0)
        await self.forget_half()
        self._half = True
        await self._http.post("/start_weight_update", seconds=60.0)
        try:
            await lend(lambda weights: courier.send(weights, tell))
        except TransferError as error:
            raise BackendError(f"{self.url} did not get the weights: {error}", again=True) from error
        except BaseException:
            courier.abort()  # Nobody waits for it any more.
            raise
        await self._http.post("/finish_weight_update", {"weight_version": label}, seconds=LOAD_SECONDS)
        self._half = False
        await self._go_on_with_new(ready)

    async def forget_half(self) -> None:
        """vLLM counts what came of each layer: what is left of weights that did not all come would be taken for part of
        the next ones. To load none at all makes it count anew."""
        if not self._half:
            return
        with contextlib.suppress(BackendError):  # It may know already that a transfer broke off, or take none.
            await self._http.post("/finish_weight_update", seconds=60.0)
        await self._reload({"weights_iterator": []}, 60.0)
        self._half = False

    async def _reload(self, arguments: Mapping[str, Any], seconds: float) -> None:
        await self._http.post("/collective_rpc", {"method": "reload_weights", "kwargs": arguments}, seconds=seconds)

    async def _ask_to_leave(self) -> None:
        with contextlib.suppress(BackendError):  # Where it fails it has nothing, or /init_... says what is wrong.
            await self._http.post("/shutdown_weight_transfer_engine", seconds=60.0)

    async def _go_on_with_new(self, ready: Callable[[], None]) -> None:
        answer = await self._http.post("/reset_prefix_cache?reset_running_requests=true", seconds=60.0)
        if isinstance(answer, dict) and answer.get("success") is False:
            raise self._http.broken("/reset_prefix_cache", "it keeps what the old weights computed")
        ready()
        await self._http.post("/resume", seconds=60.0)

    async def _set_label(self, label: str) -> None:
        try:
            await self._http.post("/update_weight_version", {"new_version": label}, seconds=60.0)
        except BackendError as error:
            if error.status not in (404, 405):  # Servers of before there were labels.
                raise

    async def load_adapter(self, name: str, directory: Path) -> None:
        body = {"lora_name": name, "lora_path": str(directory), "load_inplace": name in (await self.served()).adapters}
        await self._adapters("/v1/load_lora_adapter", body, LOAD_SECONDS)

    async def unload_adapter(self, name: str) -> None:
        await self._adapters("/v1/unload_lora_adapter", {"lora_name": name}, 60.0)

    async def _adapters(self, path: str, body: Mapping[str, Any], seconds: float) -> None:
        try:
            await self._http.post(path, body, seconds=seconds)
        except BackendError as error:
            if error.status == 404 and "Not Found" in str(error):
                raise ConfigError(
                    f"{self.url} takes no adapters; start it with --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"
                ) from error
            raise

    async def _go_on(self) -> None:
        """Somebody who was ended in the middle of an update left it paused."""
        try:
            answer = await self._http.get("/is_paused")
        except BackendError as error:
            if error.status in (404, 405):
                message = "its weights cannot be replaced; start it with VLLM_SERVER_DEV_MODE=1"
                raise ConfigError(f"{self.url} has no /is_paused: {message}") from error
            raise
        if isinstance(answer, dict) and answer.get("is_paused"):
            self._half = True
            await self.forget_half()
            await self._http.post("/resume", seconds=60.0)


async def _both(asking: asyncio.Task[Any], courier: Courier) -> None:
    """Join while the server does. Raises what the server says, where it says something, and else what NCCL does."""

    def over(done: asyncio.Task[Any]) -> None:
        if done.cancelled() or done.exception():
            courier.abort()

    asking.add_done_callback(over)
    try:
        await asyncio.to_thread(courier.join)
        await asking
    except TransferError:
        if asking.done():
            await asking
        raise
    finally:
        asking.cancel()


def check(params: SamplingParams) -> None:
    """Raises ConfigError for what vLLM would draw differently from what was asked."""
    if 0 < params.temperature < COLDEST:
        raise ConfigError(
            f"temperature={params.temperature} cannot be: vLLM draws at {COLDEST} instead; use 0 or at least {COLDEST}"
        )


class Wire(ABC):
    """How one of its paths is asked, and how it answers. `top` is how many of the likeliest tokens are asked for."""

    path: str

    def __init__(self, top: int) -> None:
        self._top = top

    @abstractmethod
    def body(self, ask: Ask, stream: bool) -> dict[str, Any]: ...

    @abstractmethod
    def run(self, choice: Mapping[str, Any]) -> Run: ...

    def weights(self, choice: Mapping[str, Any]) -> tuple[tuple[str, int], ...]:
        return ()

    @staticmethod
    def has_choice(answer: Mapping[str, Any]) -> bool:
        return bool(answer.get("choices"))


def _sampling(ask: Ask) -> dict[str, Any]:
    """What both paths take. All is said, for what is left out is taken from the model's own defaults."""
    params = ask.params
    return {
        "max_tokens": ask.max_tokens,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k,
        "min_p": params.min_p,
        "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty,
        "logit_bias": {str(token): bias for token, bias in params.logit_bias} or None,
        "repetition_penalty": params.repetition_penalty,
        "min_tokens": params.min_tokens,
        "ignore_eos": params.ignore_eos,
        "seed": params.seed,
        "stop": list(params.stop),
        "stop_token_ids": sorted(ask.end_tokens),
        "structured_outputs": {_HELD[params.constraint[0]]: params.constraint[1]} if params.constraint else None,
        # Stop strings may be special tokens: a tool call's end, say.
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
        # One more than asked for: the list begins with the token drawn.
        "logprobs": params.top_logprobs + 1 if params.top_logprobs else 0,
    }


class GenerateWire(Wire):
    """GENERATE."""

    path = GENERATE

    def body(self, ask: Ask, stream: bool) -> dict[str, Any]:
        return {"model": ask.model, "token_ids": list(ask.prompt), "stream": stream, "sampling_params": _sampling(ask)}

    def run(self, choice: Mapping[str, Any]) -> Run:
        token_ids = tuple(choice.get("token_ids") or ())
        content: Sequence[Mapping[str, Any]] = (choice.get("logprobs") or {}).get("content") or ()
        _same(token_ids, [entry["token_id"] for entry in content])
        tops = tuple(
            best([(other["token_id"], other["logprob"]) for other in entry["top_logprobs"]], self._top)
            for entry in (content if self._top else ())
        )
        return Run(token_ids, tuple(float(entry["logprob"]) for entry in content), tops)

    def weights(self, choice: Mapping[str, Any]) -> tuple[tuple[str, int], ...]:
        return tuple(
            (str(span["version"]), span["end"] - span["start"]) for span in choice.get("weight_versions") or ()
        )


class CompletionsWire(Wire):
    """COMPLETIONS, whose tokens are texts unless it is told to write their numbers."""

    path = COMPLETIONS

    def body(self, ask: Ask, stream: bool) -> dict[str, Any]:
        return {
            "model": ask.model,
            "prompt": list(ask.prompt),
            "stream": stream,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
            **_sampling(ask),
        }

    def run(self, choice: Mapping[str, Any]) -> Run:
        token_ids = tuple(choice.get("token_ids") or ())
        logprobs: Mapping[str, Any] = choice.get("logprobs") or {}
        _same(token_ids, [_number(name) for name in logprobs.get("tokens") or ()])
        tops = tuple(
            best([(_number(name), value) for name, value in entry.items()], self._top)
            for entry in (logprobs.get("top_logprobs") or () if self._top else ())
        )
        return Run(token_ids, tuple(float(value) for value in logprobs.get("token_logprobs") or ()), tops)


def _number(name: str) -> int:
    return int(name.removeprefix("token_id:"))


def _same(token_ids: Sequence[int], named: Sequence[int]) -> None:
    if list(token_ids) != list(named):
        raise ValueError(f"tokens {list(token_ids)} with the log-probabilities of {list(named)}")


def best(entries: Sequence[tuple[int, float]], most: int) -> Top:
    """The `most` likeliest of `entries`, without those that cannot be drawn."""
    possible = {token: value for token, value in entries if value > IMPOSSIBLE}
    return tuple(sorted(possible.items(), key=lambda pair: (-pair[1], pair[0]))[:most])
