"""Wire formats of vLLM's two sampling endpoints: request bodies out, token chunks in."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Final

from agentlightning.engine.base import TopLogprobs
from agentlightning.engine.servers.base import SampleRequest, TokenChunk

GENERATE: Final = "/inference/v1/generate"
COMPLETIONS: Final = "/v1/completions"
IMPOSSIBLE: Final = -9999.0
"""vLLM's log-probability of a token that cannot be sampled."""
_CONSTRAINT_FIELDS: Final[Mapping[str, str]] = {"json_schema": "json", "grammar": "grammar"}
"""Kind of constraint -> vLLM's name for it."""


class SamplingWire(ABC):
    """One endpoint's request and response. `top_logprobs` is the number of most likely tokens requested."""

    path: str

    def __init__(self, top_logprobs: int) -> None:
        self._top_logprobs = top_logprobs

    @abstractmethod
    def body(self, request: SampleRequest, stream: bool) -> dict[str, Any]: ...

    @abstractmethod
    def chunk(self, choice: Mapping[str, Any]) -> TokenChunk: ...

    def weights(self, choice: Mapping[str, Any]) -> tuple[tuple[str, int], ...]:
        """See `Completion.weights`."""
        return ()

    @staticmethod
    def has_choice(response: Mapping[str, Any]) -> bool:
        return bool(response.get("choices"))


class GenerateWire(SamplingWire):
    """GENERATE."""

    path = GENERATE

    def body(self, request: SampleRequest, stream: bool) -> dict[str, Any]:
        sampling = _sampling_params(request)
        return {
            "model": request.model,
            "token_ids": list(request.prompt),
            "stream": stream,
            "sampling_params": sampling,
        }

    def chunk(self, choice: Mapping[str, Any]) -> TokenChunk:
        token_ids = tuple(choice.get("token_ids") or ())
        content: Sequence[Mapping[str, Any]] = (choice.get("logprobs") or {}).get("content") or ()
        _check_aligned(token_ids, [entry["token_id"] for entry in content])
        top_logprobs = tuple(
            most_likely([(other["token_id"], other["logprob"]) for other in entry["top_logprobs"]], self._top_logprobs)
            for entry in (content if self._top_logprobs else ())
        )
        return TokenChunk(token_ids, tuple(float(entry["logprob"]) for entry in content), top_logprobs)

    def weights(self, choice: Mapping[str, Any]) -> tuple[tuple[str, int], ...]:
        return tuple(
            (str(span["version"]), span["end"] - span["start"]) for span in choice.get("weight_versions") or ()
        )


class CompletionsWire(SamplingWire):
    """COMPLETIONS, which names tokens by their text unless asked for their ids."""

    path = COMPLETIONS

    def body(self, request: SampleRequest, stream: bool) -> dict[str, Any]:
        return {
            "model": request.model,
            "prompt": list(request.prompt),
            "stream": stream,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
            **_sampling_params(request),
        }

    def chunk(self, choice: Mapping[str, Any]) -> TokenChunk:
        token_ids = tuple(choice.get("token_ids") or ())
        logprobs: Mapping[str, Any] = choice.get("logprobs") or {}
        _check_aligned(token_ids, [_token_id(name) for name in logprobs.get("tokens") or ()])
        top_logprobs = tuple(
            most_likely([(_token_id(name), value) for name, value in entry.items()], self._top_logprobs)
            for entry in (logprobs.get("top_logprobs") or () if self._top_logprobs else ())
        )
        return TokenChunk(
            token_ids, tuple(float(value) for value in logprobs.get("token_logprobs") or ()), top_logprobs
        )


def _sampling_params(request: SampleRequest) -> dict[str, Any]:
    """The fields that both endpoints take. All are sent, since vLLM takes missing ones from the model's defaults."""
    params, constraint = request.params, request.params.constraint
    return {
        "max_tokens": request.max_tokens,
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
        "stop_token_ids": sorted(request.end_tokens),
        "structured_outputs": {_CONSTRAINT_FIELDS[constraint[0]]: constraint[1]} if constraint else None,
        # Stop strings may be special tokens, such as the end of a tool call.
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
        # One more than requested, because the list begins with the sampled token.
        "logprobs": params.top_logprobs + 1 if params.top_logprobs else 0,
    }


def _token_id(name: str) -> int:
    return int(name.removeprefix("token_id:"))


def _check_aligned(token_ids: Sequence[int], named: Sequence[int]) -> None:
    if list(token_ids) != list(named):
        raise ValueError(f"tokens {list(token_ids)} with the log-probabilities of {list(named)}")


def most_likely(entries: Sequence[tuple[int, float]], limit: int) -> TopLogprobs:
    """The `limit` most likely of `entries`, without tokens that cannot be sampled."""
    possible = {token: value for token, value in entries if value > IMPOSSIBLE}
    return tuple(sorted(possible.items(), key=lambda pair: (-pair[1], pair[0]))[:limit])
