"""Client of one SGLang server: sampling by token ids, and the endpoints that replace its weights.

Written from SGLang's documentation and tested against a scripted server only, never against a real one. SGLang reports
the log-probability that a token had under the temperature, before top_p and top_k removed others. That is not the
distribution it was sampled from, so these parameters are rejected.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from agentlightning.engine.base import TERMINATION_PARAMS, SamplingParams
from agentlightning.engine.servers.clients.http import (
    Completion,
    HttpModelServer,
    ModelServerError,
    OnChunk,
    SampleRequest,
    TokenChunk,
)
from agentlightning.errors import ConfigError

GENERATE: Final = "/generate"
LOAD_SECONDS: Final = 600.0
NOT_ENABLED: Final = "LoRA is not enabled"
"""What SGLang answers to an adapter without --enable-lora."""


class SGLangServer(HttpModelServer):
    """One SGLang server at `url` (without `/v1`). `token` is the server's `--api-key`."""

    supported_params: frozenset[str] = frozenset(TERMINATION_PARAMS)
    kv_cache_metrics = ("sglang:token_usage",)
    """Reported by servers that were started with `--enable-metrics`."""

    # -- sampling --------------------------------------------------------------------------------------------------

    async def sample(self, request: SampleRequest, on_chunk: OnChunk, *, stream: bool) -> Completion:
        validate(request.params)
        count = 0

        def read(response: Any) -> Completion | None:
            """Pass on the new tokens; returns the end of the answer once it is known."""
            nonlocal count
            try:
                meta: Mapping[str, Any] = response["meta_info"]
                chunk = _new_tokens(meta, count, request.params.top_logprobs)
                reason: Mapping[str, Any] | None = meta.get("finish_reason")
                kind = reason["type"] if reason else None
            except (KeyError, TypeError, ValueError) as error:
                raise self.protocol_error(GENERATE, f"no answer but {response!r:.300}") from error
            if chunk.token_ids:
                count += len(chunk.token_ids)
                on_chunk(chunk)
            if kind not in (None, "stop", "length"):
                raise self.protocol_error(GENERATE, f"the answer was ended by the server ({reason})")
            # SGLang has one label for a whole answer: after a weight update, that of the last token. It is not used.
            return None if kind is None else Completion(kind)

        return await self._complete(GENERATE, _body(request, stream), request, read)

    # -- weights ---------------------------------------------------------------------------------------------------

    async def weight_label(self) -> str | None:
        response = await self.get("/get_model_info")
        label = response.get("weight_version") if isinstance(response, dict) else None
        return None if label is None else str(label)

    async def load_weights(self, directory: Path, label: str, on_loaded: Callable[[], None]) -> None:
        # retract: running answers wait without keys and values, which the new weights then compute again.
        await self.post("/pause_generation", {"mode": "retract"}, seconds=60.0)
        body = {"model_path": str(directory), "weight_version": label, "flush_cache": True}
        await self._post_checked("/update_weights_from_disk", body)
        on_loaded()
        await self.post("/continue_generation", {}, seconds=60.0)

    async def load_adapter(self, name: str, directory: Path) -> None:
        if name in (await self.model_info()).adapters:
            await self.unload_adapter(name)
        try:
            await self._post_checked("/load_lora_adapter", {"lora_name": name, "lora_path": str(directory)})
        except ModelServerError as error:
            if error.status == 404 or NOT_ENABLED in str(error):
                raise ConfigError(
                    f"{self.url} takes no adapters ({error}); start it with --enable-lora, --max-lora-rank and "
                    "--lora-target-modules all"
                ) from error
            raise

    async def unload_adapter(self, name: str) -> None:
        await self._post_checked("/unload_lora_adapter", {"lora_name": name})

    async def _post_checked(self, path: str, body: Mapping[str, Any]) -> None:
        response = await self.post(path, body, seconds=LOAD_SECONDS)
        if isinstance(response, dict) and response.get("success") is False:
            message = response.get("message") or response.get("error_message") or "it failed"
            raise self.protocol_error(path, str(message))


def _new_tokens(meta: Mapping[str, Any], known: int, limit: int) -> TokenChunk:
    """The tokens of an event after the `known` ones, with the `limit` most likely at each position. Each event repeats
    all tokens before it, unless the server was started to send only new ones; the token count of an event tells
    which."""
    tokens: Sequence[Sequence[Any]] = meta.get("output_token_logprobs") or ()
    tops: Sequence[Sequence[Sequence[Any]]] = (meta.get("output_top_logprobs") or ()) if limit else ()
    start = known if len(tokens) == meta["completion_tokens"] else 0
    return TokenChunk(
        tuple(int(entry[1]) for entry in tokens[start:]),
        tuple(float(entry[0]) for entry in tokens[start:]),
        tuple(tuple((int(entry[1]), float(entry[0])) for entry in position[:limit]) for position in tops[start:]),
    )


def validate(params: SamplingParams) -> None:
    """Raises ConfigError if the log-probabilities would not be those of the distribution sampled from."""
    if params.temperature > 0 and (params.top_p < 1 or params.top_k > 0):
        raise ConfigError(
            f"top_p={params.top_p} and top_k={params.top_k} cannot be used with SGLang, whose log-probabilities leave "
            "them out; use temperature alone, or vLLM"
        )


def _body(request: SampleRequest, stream: bool) -> dict[str, Any]:
    params = request.params
    sampling: dict[str, Any] = {
        "max_new_tokens": request.max_tokens,
        "temperature": params.temperature,
        "stop": list(params.stop),
        "stop_token_ids": sorted(request.end_tokens),
        "ignore_eos": params.ignore_eos,
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
    }
    if params.seed is not None:
        sampling["sampling_seed"] = params.seed
    body: dict[str, Any] = {
        "input_ids": list(request.prompt),
        "sampling_params": sampling,
        "return_logprob": True,
        "top_logprobs_num": params.top_logprobs,
        "stream": stream,
    }
    if request.adapter:
        body["lora_path"] = request.model
    return body
