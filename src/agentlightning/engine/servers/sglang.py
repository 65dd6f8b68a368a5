"""One SGLang server: tokens in, tokens out by `/generate`, and the paths that replace its weights.

`SGLangServer` is a `policy.backend.Backend`, written from SGLang's documentation and tried against a scripted server
only: it never ran against a real one. SGLang answers the log-probability a token had under the temperature, before
top_p and top_k cut the others off, which is not that of the distribution it was drawn from: these are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any, Final

from agentlightning.engine.base import TERMINATION_PARAMS, SamplingParams
from agentlightning.engine.servers.base import Ask, BackendError, End, Http, Receive, Run, Served, Top, refusal
from agentlightning.errors import ConfigError
from agentlightning.transport import Transport

GENERATE: Final = "/generate"
LOAD_SECONDS: Final = 600.0


class SGLangServer:
    """One SGLang server at `url` (without `/v1`). `token` is what it was started with as `--api-key`."""

    supported_params: frozenset[str] = frozenset(TERMINATION_PARAMS)

    def __init__(
        self,
        transport: Transport,
        url: str,
        *,
        token: str | None = None,
        seconds: float = 600.0,
        connect_seconds: float = 10.0,
    ) -> None:
        self._http = Http(transport, url.removesuffix("/v1"), token, seconds=seconds, connect_seconds=connect_seconds)

    @property
    def url(self) -> str:
        return self._http.url

    async def served(self) -> Served:
        cards: list[dict[str, Any]] = ((await self._http.get("/v1/models")) or {}).get("data", [])
        found = [card for card in cards if not card.get("parent") and card.get("max_model_len")]
        if not found:
            raise ConfigError(f"{self.url}/v1/models names no model with its max_model_len")
        adapters = frozenset(str(card["id"]) for card in cards if card.get("parent"))
        return Served(str(found[0]["id"]), int(found[0]["max_model_len"]), adapters)

    async def check(self, *, weights_change: bool) -> None:
        """Its paths for new weights are there in every server: nothing to find out."""

    async def health(self) -> None:
        await self._http.get("/health", seconds=5.0)

    # -- drawing ---------------------------------------------------------------------------------------------------

    async def draw(self, ask: Ask, receive: Receive, *, stream: bool) -> End:
        check(ask.params)
        body = _body(ask, stream)
        progress = _Progress(self._http, ask.params.top_logprobs, receive)
        try:
            if not stream:
                progress.take(await self._http.post(GENERATE, body))
            else:
                async with aclosing(self._http.events(GENERATE, body)) as events:
                    async for event in events:
                        progress.take(event)
        except BackendError as error:
            raise refusal(error, ask) from None
        if progress.end is None:
            raise self._http.broken(GENERATE, "its answer has no end")
        return progress.end

    # -- weights ---------------------------------------------------------------------------------------------------

    async def label(self) -> str | None:
        answer = await self._http.get("/get_model_info")
        label = answer.get("weight_version") if isinstance(answer, dict) else None
        return None if label is None else str(label)

    async def load(self, directory: Path, label: str, ready: Callable[[], None]) -> None:
        # retract: answers under way wait without keys and values, which the new weights then compute again.
        await self._http.post("/pause_generation", {"mode": "retract"}, seconds=60.0)
        body = {"model_path": str(directory), "weight_version": label, "flush_cache": True}
        await self._succeed("/update_weights_from_disk", body)
        ready()
        await self._http.post("/continue_generation", {}, seconds=60.0)

    async def load_adapter(self, name: str, directory: Path) -> None:
        if name in (await self.served()).adapters:
            await self.unload_adapter(name)
        await self._succeed("/load_lora_adapter", {"lora_name": name, "lora_path": str(directory)})

    async def unload_adapter(self, name: str) -> None:
        await self._succeed("/unload_lora_adapter", {"lora_name": name})

    async def _succeed(self, path: str, body: Mapping[str, Any]) -> None:
        answer = await self._http.post(path, body, seconds=LOAD_SECONDS)
        if isinstance(answer, dict) and answer.get("success") is False:
            raise self._http.broken(path, str(answer.get("message") or answer.get("error_message") or "it failed"))


class _Progress:
    """An answer of `/generate` as far as it has come. Its events repeat all before them, or, where the server was
    started to do so, do not; the count of tokens in each tells which."""

    def __init__(self, http: Http, top: int, receive: Receive) -> None:
        self._http = http
        self._top = top
        self._receive = receive
        self._count = 0
        self.end: End | None = None

    def take(self, answer: Any) -> None:
        try:
            meta: Mapping[str, Any] = answer["meta_info"]
            run = self._fresh(meta)
            reason: Mapping[str, Any] | None = meta.get("finish_reason")
            kind = reason["type"] if reason else None
        except (KeyError, TypeError, ValueError) as error:
            raise self._http.broken(GENERATE, f"no answer but {answer!r:.300}") from error
        if run.token_ids:
            self._count += len(run.token_ids)
            self._receive(run)
        if reason is None:
            return
        if kind not in ("stop", "length"):
            raise self._http.broken(GENERATE, f"the answer was ended by the server ({reason})")
        # One label for all of an answer: across a change of the weights it is that of the last token alone.
        self.end = End("length" if kind == "length" else "stop")

    def _fresh(self, meta: Mapping[str, Any]) -> Run:
        drawn: Sequence[Sequence[Any]] = meta.get("output_token_logprobs") or ()
        tops: Sequence[Sequence[Sequence[Any]]] = (meta.get("output_top_logprobs") or ()) if self._top else ()
        if len(drawn) == meta["completion_tokens"]:
            drawn, tops = drawn[self._count :], tops[self._count :]
        top_logprobs: tuple[Top, ...] = tuple(
            tuple((int(entry[1]), float(entry[0])) for entry in place[: self._top]) for place in tops
        )
        return Run(tuple(int(entry[1]) for entry in drawn), tuple(float(entry[0]) for entry in drawn), top_logprobs)


def check(params: SamplingParams) -> None:
    """Raises ConfigError where the log-probabilities would not be those of the distribution drawn from."""
    if params.temperature > 0 and (params.top_p < 1 or params.top_k > 0):
        raise ConfigError(
            f"top_p={params.top_p} and top_k={params.top_k} cannot be used with SGLang, whose log-probabilities leave "
            "them out; use temperature alone, or vLLM"
        )


def _body(ask: Ask, stream: bool) -> dict[str, Any]:
    params = ask.params
    sampling: dict[str, Any] = {
        "max_new_tokens": ask.max_tokens,
        "temperature": params.temperature,
        "stop": list(params.stop),
        "stop_token_ids": sorted(ask.end_tokens),
        "ignore_eos": params.ignore_eos,
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
    }
    if params.seed is not None:
        sampling["sampling_seed"] = params.seed
    body: dict[str, Any] = {
        "input_ids": list(ask.prompt),
        "sampling_params": sampling,
        "return_logprob": True,
        "top_logprobs_num": params.top_logprobs,
        "stream": stream,
    }
    if ask.adapter:
        body["lora_path"] = ask.model
    return body
