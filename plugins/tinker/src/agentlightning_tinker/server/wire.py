"""What travels of the Tinker API, as far as this server answers it: the JSON requests, and the protocol buffers of
`forward_backward` and of the two results that are not JSON.

The package sends every field of a JSON request with its default. A field that is not declared here is refused by name
if it is set, so that nothing is asked for and silently left out. The types of the protocol buffers are those of the
package; arrays are little-endian.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
from google.protobuf.message import DecodeError, Message
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    StrictInt,
    field_validator,
    model_validator,
)
from starlette.responses import Response
from tinker.proto import tinker_public_pb2  # pyright: ignore[reportMissingImports, reportMissingModuleSource]

from agentlightning.engine.base import Sample
from agentlightning.errors import ConfigError
from agentlightning.trajectory import FloatArray
from agentlightning.util.settings import AtLeastOne, ShareBelowOne
from agentlightning_tinker.losses import columns_of

OLDEST_SDK: Final = "0.30"
"""The oldest version of the `tinker` package whose requests this server reads."""
UNUSED: Final = frozenset({"type", "tags", "user_metadata", "project_id", "display_name", "allow_metadata_only"})
"""Fields that change nothing here, whatever they say."""


class WireRequest(BaseModel):
    """The base of requests."""

    model_config = ConfigDict(extra="allow", frozen=True, protected_namespaces=())

    @model_validator(mode="after")
    def _refuse_unknown(self) -> WireRequest:
        for name, value in (self.model_extra or {}).items():
            if value and name not in UNUSED:
                raise ValueError(f"{name}={value!r} is not offered by this server; leave it out")
        return self


class CreateSession(WireRequest):
    sdk_version: str = ""

    @field_validator("sdk_version")
    @classmethod
    def _check_sdk(cls, version: str) -> str:
        """One that cannot be read passes."""
        found, oldest = version.split(".")[:2], OLDEST_SDK.split(".")
        if len(found) == 2 and all(part.isdigit() for part in found) and [*map(int, found)] < [*map(int, oldest)]:
            raise ValueError(f"version {version} of the tinker package is too old; install {OLDEST_SDK} or newer")
        return version


class SessionId(WireRequest):
    session_id: str


class LoraShape(WireRequest):
    rank: AtLeastOne
    seed: int | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


ABOUT: Final = "tinker.json"
"""Where the rest of `Saved` is, in its directory."""


class Saved(BaseModel, frozen=True):
    """Fixed weights on the disk, and what they fit."""

    directory: Path = Field(Path(), exclude=True)
    base: str
    shape: LoraShape
    saved: float = 0.0
    """When: what is saved again at the same place are others."""

    @property
    def name(self) -> str:
        """Which no others have."""
        return f"{self.directory}@{self.saved}"


OptimizerKind = Mapping[Literal["type"], Literal["adamw"]]
"""The optimiser of a model; there is one."""


class CreateModel(WireRequest):
    session_id: str
    model_seq_id: int
    base_model: str
    lora_config: LoraShape | None = None
    optimizer_config: OptimizerKind | None = None


class ModelId(WireRequest):
    model_id: str


class Place(BaseModel):
    """Whose turn a request is, whatever else it says."""

    model_id: str
    seq_id: int


class AdamParams(WireRequest):
    learning_rate: NonNegativeFloat = 1e-4
    beta1: ShareBelowOne = 0.9
    beta2: ShareBelowOne = 0.95
    eps: NonNegativeFloat = 1e-12
    weight_decay: NonNegativeFloat = 0.0
    grad_clip_norm: float = 0.0


class Queued(ModelId):
    """The base of requests that have a turn among those of their model."""

    seq_id: int


class OptimStep(Queued):
    adam_params: AdamParams


class SaveWeights(Queued):
    path: str | None = None
    overwrite: bool = False


class SaveForSampler(Queued):
    path: str | None = None
    sampling_session_seq_id: int | None = None
    kind: Literal["snapshot"] = "snapshot"


class SaveExternal(Queued):
    path: str


class LoadWeights(WireRequest):
    """Without a model and its number, it begins one."""

    model_id: str | None = None
    seq_id: int | None = None
    session_id: str | None = None
    model_seq_id: int | None = None
    base_model: str | None = None
    path: str
    optimizer: bool = False
    optimizer_config: OptimizerKind | None = None


class CreateSampler(WireRequest):
    session_id: str
    sampling_session_seq_id: int
    base_model: str | None = None
    model_path: str | None = None


class TokenChunk(WireRequest):
    type: Literal["encoded_text"] = "encoded_text"
    tokens: list[StrictInt]


class Prompt(WireRequest):
    chunks: list[TokenChunk]

    @property
    def tokens(self) -> list[int]:
        return [token for chunk in self.chunks for token in chunk.tokens]


class SamplingSettings(WireRequest):
    max_tokens: int | None = None
    seed: int | None = None
    stop: str | list[StrictInt] | list[str] | None = None
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0


class SampleRequest(WireRequest):
    prompt: Prompt
    sampling_params: SamplingSettings
    num_samples: int = Field(default=1, ge=1, le=1024)
    sampling_session_id: str | None = None
    seq_id: int | None = None
    prompt_logprobs: bool | None = None
    prompt_logprobs_last_n: AtLeastOne | None = None
    topk_sample_logprobs: NonNegativeInt = 0


class RequestId(WireRequest):
    request_id: str


class WeightsPath(WireRequest):
    tinker_path: str


# -- protocol buffers --------------------------------------------------------------------------------------------------

PROTOBUF: Final = "application/x-protobuf"
proto: Final[Any] = tinker_public_pb2
_DTYPES: Final = {proto.DTYPE_FLOAT32: "<f4", proto.DTYPE_INT64: "<i8", proto.DTYPE_INT32: "<i4"}
NO_TOKEN: Final = (0, -99999.0)
"""What the package reads as none, where fewer tokens can be sampled than were asked for."""


@dataclass(frozen=True, slots=True)
class Datum:
    """A row of tokens, and for each position what is predicted there and what the loss needs of it [T]."""

    inputs: tuple[int, ...]
    targets: tuple[int, ...]
    """The token to predict after each of `inputs`."""
    columns: Mapping[str, FloatArray]
    """By the names that losses have for them; every datum of a loss has the same."""


def read_request(body: bytes) -> Any:
    """A `ForwardBackwardRequest`. Raises ConfigError for bytes that are none."""
    try:
        return proto.ForwardBackwardRequest.FromString(body)
    except DecodeError as error:
        raise ConfigError(f"the body is no forward_backward request of the tinker package: {error}") from error


def loss_config(request: Any) -> dict[str, float | str]:
    """The settings of the loss."""
    newer = {name: value.text or value.number for name, value in request.loss_fn_config_v2.items()}
    return {**request.loss_fn_config, **newer}


def read_data(request: Any, vocab_size: int, context_length: int) -> list[Datum]:
    """The sequences. Raises ConfigError for images, audio, arrays that are no numbers of tokens, inputs that the loss
    cannot use, tokens that a model of this size cannot have, and none."""
    found: list[Datum] = []
    for datum in request.data:
        if not all(chunk.HasField("encoded_text") for chunk in datum.model_input):
            raise ConfigError("a sequence has an image or audio; this server trains text models, so send tokens only")
        tokens = np.frombuffer(b"".join(chunk.encoded_text.tokens for chunk in datum.model_input), "<i4").tolist()
        inputs = {name: _array(name, tensor) for name, tensor in datum.loss_fn_inputs.items()}
        columns = columns_of(request.loss_fn, len(tokens), inputs)
        targets = inputs["target_tokens"].tolist()
        if wrong := [token for token in (*tokens, *targets) if not 0 <= token < vocab_size]:
            raise ConfigError(f"token {wrong[0]} is not one of the {vocab_size} of the model; use its own tokenizer")
        if len(tokens) > context_length:
            raise ConfigError(f"a sequence has {len(tokens)} tokens, and the model holds {context_length}")
        found.append(Datum(tuple(tokens), tuple(targets), columns))
    if not found:
        raise ConfigError("there are no sequences to learn from; give at least one")
    return found


def _array(name: str, tensor: Any) -> Any:
    if tensor.dtype not in _DTYPES:
        raise ConfigError(f"the loss input {name!r} has the unknown dtype {tensor.dtype}; send float32 or int64")
    if tensor.HasField("sparse_csr") or len(tensor.shape) > 1:
        raise ConfigError(
            f"the loss input {name!r} has the shape {list(tensor.shape)}; this server takes one number for each token"
        )
    return np.frombuffer(tensor.dense, _DTYPES[tensor.dtype]).copy()


def loss_output(logprobs: Sequence[Any], loss: float) -> Response:
    """The result of `forward_backward`: log p of the targets of each sequence, and the sum of the losses."""
    rows = [np.asarray(row, "<f4") for row in logprobs]
    columns = proto.BatchedTensor(
        data=b"".join(row.tobytes() for row in rows),
        offsets=np.cumsum([0, *(row.nbytes for row in rows)]).astype("<i8").tobytes(),
        dtype=proto.DTYPE_FLOAT32,
    )
    kind = "TorchLossReturn"
    record = proto.ArrayRecord(type_tag=kind, num_datums=len(rows), fields={"logprobs": columns})
    metrics = {"loss:sum": loss}
    return _response(proto.ForwardBackwardOutput(loss_fn_output_type=kind, loss_fn_outputs=[record], metrics=metrics))


def sample_output(samples: Sequence[Sample], prompt_logprobs: FloatArray | None) -> Response:
    """The result of `asample`. `prompt_logprobs`: of each token of the prompt, NaN where it has none."""
    prompt = None if prompt_logprobs is None else np.asarray(prompt_logprobs, "<f4").tobytes()
    return _response(proto.SampleResponse(sequences=map(_sequence, samples), prompt_logprobs=prompt))


def _response(message: Message) -> Response:
    return Response(message.SerializeToString(), media_type=PROTOBUF)


def _sequence(sample: Sample) -> Any:
    k = max(map(len, sample.top_logprobs), default=0)
    top = np.asarray([[*row, *[NO_TOKEN] * (k - len(row))] for row in sample.top_logprobs])  # [T, k, 2], or empty
    return proto.SampledSequence(
        stop_reason=proto.STOP_REASON_STOP if sample.finish_reason == "stop" else proto.STOP_REASON_LENGTH,
        tokens=np.asarray(sample.token_ids, "<i4").tobytes(),
        logprobs=np.asarray(sample.logprobs, "<f4").tobytes(),
        topk_sampled_logprobs=None
        if not top.size
        else proto.TopkLogprobs(
            k=k,
            length=len(top),
            token_ids=top[..., 0].astype("<i4").tobytes(),
            logprobs=top[..., 1].astype("<f4").tobytes(),
        ),
    )
