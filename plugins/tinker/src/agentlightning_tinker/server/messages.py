"""The protocol buffers of the Tinker API: the request of `forward_backward`, and the two results that are not JSON.

Only the fields that are used here are declared; others of a message are skipped when it is read. Numbers and types are
those that version 0.38 of the `tinker` package sends. Arrays are little-endian.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError

from agentlightning.errors import ConfigError

PACKAGE: Final = "agentlightning.tinker"
FLOAT32, INT64 = 1, 2
_DTYPES: Final = {FLOAT32: "<f4", INT64: "<i8", 3: "<i4"}

_FIELDS: Final[dict[str, str]] = {
    "TopLogprobs": "1 token_ids bytes, 2 logprobs bytes, 3 k uint32, 4 length uint32",
    "SampledSequence": "1 stop_reason int32, 2 tokens bytes, 3 logprobs bytes, 4 top .TopLogprobs",
    "SampleResponse": "1 sequences *.SampledSequence, 2 prompt_logprobs bytes",
    "BatchedTensor": "1 data bytes, 2 offsets bytes, 3 dtype int32",
    "FieldsEntry": "1 key string, 2 value .BatchedTensor",
    "ArrayRecord": "1 type_tag string, 2 fields *.FieldsEntry, 3 num_datums int64",
    "MetricsEntry": "1 key string, 2 value double",
    "ForwardBackwardOutput": "1 loss_fn_output_type string, 2 loss_fn_outputs *.ArrayRecord, 3 metrics *.MetricsEntry",
    "SparseCsr": "1 values bytes, 2 crow_indices bytes, 3 col_indices bytes",
    "Tensor": "1 dense bytes, 2 sparse_csr .SparseCsr, 3 dtype int32, 4 shape *int64",
    "TokenChunk": "1 tokens bytes",
    "OtherChunk": "",
    "Chunk": "1 encoded_text .TokenChunk, 2 image .OtherChunk, 3 audio .OtherChunk",
    "InputEntry": "1 key string, 2 value .Tensor",
    "Datum": "1 model_input *.Chunk, 2 loss_fn_inputs *.InputEntry",
    "ConfigValue": "1 number double, 2 text string",
    "ConfigEntry": "1 key string, 2 value .ConfigValue",
    "ForwardBackwardRequest": (
        "1 model_id string, 2 seq_id int32, 3 data *.Datum, 4 loss_fn string, 5 loss_fn_config *.MetricsEntry, "
        "6 forward_only bool, 7 loss_fn_config_v2 *.ConfigEntry"
    ),
}
"""By message: number, name and type of each field; * for a repeated one, and a dot before the name of a message. A map
is a repeated message of key and value, as it is on the wire."""


def _file() -> descriptor_pb2.FileDescriptorProto:
    kinds = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="tinker.proto", package=PACKAGE, syntax="proto3")
    for message, fields in _FIELDS.items():
        own = file.message_type.add(name=message)
        for number, name, kind in (each.split() for each in fields.split(", ") if each):
            one = kind.removeprefix("*")
            field = own.field.add(name=name, number=int(number))
            field.label = kinds.LABEL_REPEATED if kind.startswith("*") else kinds.LABEL_OPTIONAL
            if one.startswith("."):
                field.type, field.type_name = kinds.TYPE_MESSAGE, f".{PACKAGE}{one}"
            else:
                field.type = kinds.Type.Value(f"TYPE_{one.upper()}")
    return file


_POOL: Final = descriptor_pool.DescriptorPool()
_POOL.Add(_file())  # pyright: ignore[reportUnknownMemberType]


def new(message: str) -> Any:
    """An empty message of a type of `_FIELDS`."""
    return message_factory.GetMessageClass(_POOL.FindMessageTypeByName(f"{PACKAGE}.{message}"))()


Row = tuple[tuple[int, ...], Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class ForwardBackward:
    """The request of `forward_backward`."""

    model_id: str
    seq_id: int
    loss_fn: str
    loss_config: Mapping[str, float | str]
    forward_only: bool
    raw: Any
    """The message, whose sequences are read by `data`."""

    def data(self) -> list[Row]:
        """For each sequence its tokens, and its inputs of the loss by name, as NumPy arrays. Raises ConfigError for
        images, audio, and arrays that are no numbers of tokens."""
        return [(_tokens(each), {e.key: _array(e.key, e.value) for e in each.loss_fn_inputs}) for each in self.raw.data]


def read_request(body: bytes) -> ForwardBackward:
    """Raises ConfigError for bytes that are no such request."""
    message = new("ForwardBackwardRequest")
    try:
        message.ParseFromString(body)
    except DecodeError as error:
        raise ConfigError(f"the body is no forward_backward request of the tinker package: {error}") from error
    config: dict[str, float | str] = {each.key: float(each.value) for each in message.loss_fn_config}
    for each in message.loss_fn_config_v2:
        config[each.key] = each.value.text or float(each.value.number)
    return ForwardBackward(
        message.model_id, int(message.seq_id), message.loss_fn, config, bool(message.forward_only), message
    )


def _tokens(datum: Any) -> tuple[int, ...]:
    import numpy as np

    found: list[int] = []
    for chunk in datum.model_input:
        if chunk.HasField("image") or chunk.HasField("audio"):
            raise ConfigError("a sequence has an image or audio; this server trains text models, so send tokens only")
        found += np.frombuffer(chunk.encoded_text.tokens, "<i4").tolist()
    return tuple(found)


def _array(name: str, tensor: Any) -> Any:
    import numpy as np

    if tensor.dtype not in _DTYPES:
        raise ConfigError(f"the loss input {name!r} has the unknown dtype {tensor.dtype}; send float32 or int64")
    if tensor.HasField("sparse_csr") or len(tensor.shape) > 1:
        raise ConfigError(
            f"the loss input {name!r} has the shape {list(tensor.shape)}; this server takes one number for each token"
        )
    return np.frombuffer(tensor.dense, _DTYPES[tensor.dtype]).copy()


def loss_output(logprobs: Sequence[Any], metrics: Mapping[str, float]) -> bytes:
    """The result of `forward_backward`: log p of the targets of each sequence."""
    import numpy as np

    message = new("ForwardBackwardOutput")
    message.loss_fn_output_type = "TorchLossReturn"
    record = message.loss_fn_outputs.add(type_tag="TorchLossReturn", num_datums=len(logprobs))
    field = record.fields.add(key="logprobs")
    rows = [np.asarray(row, "<f4") for row in logprobs]
    field.value.data = b"".join(row.tobytes() for row in rows)
    field.value.offsets = np.cumsum([0, *(row.nbytes for row in rows)]).astype("<i8").tobytes()
    field.value.dtype = FLOAT32
    for name, value in metrics.items():
        message.metrics.add(key=name, value=value)
    return bytes(message.SerializeToString())


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """A sampled sequence."""

    tokens: Sequence[int]
    logprobs: Sequence[float]
    stopped: bool
    """Whether it ended by itself, and not at its limit of tokens."""
    top: Sequence[Sequence[tuple[int, float]]] = ()
    """The most likely tokens of each position."""


def sample_output(sequences: Sequence[SampledTokens], prompt_logprobs: Sequence[float] | None) -> bytes:
    """The result of `asample`. `prompt_logprobs`: of each token of the prompt, NaN where it has none."""
    import numpy as np

    message = new("SampleResponse")
    for each in sequences:
        own = message.sequences.add(stop_reason=0 if each.stopped else 1)
        own.tokens = np.asarray(each.tokens, "<i4").tobytes()
        own.logprobs = np.asarray(each.logprobs, "<f4").tobytes()
        if each.top:
            own.top.k, own.top.length = len(each.top[0]), len(each.top)
            own.top.token_ids = np.asarray([token for row in each.top for token, _ in row], "<i4").tobytes()
            own.top.logprobs = np.asarray([logprob for row in each.top for _, logprob in row], "<f4").tobytes()
    if prompt_logprobs is not None:
        message.prompt_logprobs = np.asarray(prompt_logprobs, "<f4").tobytes()
    return bytes(message.SerializeToString())
