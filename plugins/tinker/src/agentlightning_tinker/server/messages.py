"""The protocol buffers of the Tinker API: the request of `forward_backward`, and the two results that are not JSON.

Their types are those of the `tinker` package. Arrays are little-endian.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np
from google.protobuf.message import DecodeError, Message
from starlette.responses import Response
from tinker.proto import tinker_public_pb2  # pyright: ignore[reportMissingImports, reportMissingModuleSource]

from agentlightning.engine.base import Sample
from agentlightning.errors import ConfigError

PROTOBUF: Final = "application/x-protobuf"
proto: Final[Any] = tinker_public_pb2
_DTYPES: Final = {proto.DTYPE_FLOAT32: "<f4", proto.DTYPE_INT64: "<i8", proto.DTYPE_INT32: "<i4"}
NO_TOKEN: Final = (0, -99999.0)
"""What the package reads as none, where fewer tokens can be sampled than were asked for."""
Row = tuple[list[int], Mapping[str, Any]]
"""A sequence: its tokens, and its inputs of the loss by name, as NumPy arrays."""


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


def rows_of(request: Any) -> Iterator[Row]:
    """The sequences. Raises ConfigError for images, audio, and arrays that are no numbers of tokens."""
    for datum in request.data:
        if not all(chunk.HasField("encoded_text") for chunk in datum.model_input):
            raise ConfigError("a sequence has an image or audio; this server trains text models, so send tokens only")
        tokens = np.frombuffer(b"".join(chunk.encoded_text.tokens for chunk in datum.model_input), "<i4")
        yield tokens.tolist(), {name: _array(name, tensor) for name, tensor in datum.loss_fn_inputs.items()}


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


def sample_output(samples: Sequence[Sample], prompt_logprobs: Sequence[float] | None) -> Response:
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
