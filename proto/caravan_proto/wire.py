"""The codecs of the messages: which dataclass travels as which protobuf message."""

from array import array
from collections.abc import Sequence
from typing import Any

from caravan_proto.codec import Codec, Columns, MalformedError, Named, Nanoseconds, Pairs, Switch
from caravan_proto.messages.commands import (
    Chunk,
    Command,
    Decode,
    Evaluate,
    FilterBatch,
    Header,
    Load,
    LoadEntry,
    Prefill,
    PrefixCopy,
    Row,
    RunNote,
    RunSlice,
    Save,
    SaveEntry,
    SequenceParameters,
    SetLayout,
)
from caravan_proto.messages.constraint import Constraint, ConstraintKind, Thought
from caravan_proto.messages.limits import KvLayout, LayoutLimits, Limits, SavedBytes, Saving
from caravan_proto.messages.media import (
    EncodedMedia,
    MediaFacts,
    MediaKind,
    MediaShape,
    MediaSpan,
    PromptPart,
    TextPart,
    TokenizedParts,
)
from caravan_proto.messages.model import (
    FillTokens,
    Info,
    Kernels,
    MetadataValue,
    ModelFile,
    Numerics,
    ShardClaim,
    ShardStatus,
    TokenizedText,
)
from caravan_proto.messages.results import Holdings, LayoutSet, Loaded, Saved
from caravan_proto.messages.sampling import RequestDefaults, SamplingParams, valid_defaults
from caravan_proto.shard.v1 import shard_pb2, types_pb2


class ConstraintCodec(Codec[Constraint, types_pb2.Constraint]):
    """A constraint is the field of its kind."""

    def __init__(self) -> None:
        super().__init__(Constraint, types_pb2.Constraint, left_out=["kind", "source"])

    def encode(self, value: Constraint) -> types_pb2.Constraint:
        """Return the protobuf message."""
        message = types_pb2.Constraint()
        setattr(message, value.kind.value, value.source)
        return message

    def decode(self, message: types_pb2.Constraint, **_: Any) -> Constraint | None:  # type: ignore[override]
        """Return the constraint; None if the message has none."""
        kind = message.WhichOneof("kind")
        return None if kind is None else Constraint(ConstraintKind(kind), getattr(message, kind))


class _Note:
    """The note of a run, which is encoded in a field of bytes: a shard does not read it."""

    def put(self, value: RunNote | bytes, into: dict[str, Any]) -> None:
        into["note"] = encode_note(value)

    def take(self, message: shard_pb2.SaveEntry) -> bytes:
        return message.note


class _TokenArray:
    """Tokens in an array, which takes 4 bytes for each."""

    def put(self, value: Sequence[int], into: dict[str, Any]) -> None:
        into["token_ids"] = value

    def take(self, message: shard_pb2.RunNote) -> Sequence[int]:
        return array("i", message.token_ids)


class _Claim:
    """The claim of a router, in two fields."""

    def put(self, value: ShardClaim | None, into: dict[str, Any]) -> None:
        if value is not None:
            into["wanted_by"], into["wanted_urgently"] = value.held, value.urgent

    def take(self, message: shard_pb2.WatchResponse) -> ShardClaim | None:
        return ShardClaim(message.wanted_by, message.wanted_urgently) if message.HasField("wanted_by") else None


class _Metadata:
    """Pairs of a key and a text, a number or a flag, in the order of their keys."""

    def put(self, value: Sequence[tuple[str, MetadataValue]], into: dict[str, Any]) -> None:
        into["metadata"] = {key: _metadata_value(one) for key, one in value}

    def take(self, message: shard_pb2.ModelInfo) -> tuple[tuple[str, MetadataValue], ...]:
        return tuple(
            (key, getattr(one, one.WhichOneof("value") or "text")) for key, one in sorted(message.metadata.items())
        )


def _metadata_value(value: MetadataValue) -> shard_pb2.MetadataValue:
    match value:
        case bool():
            return shard_pb2.MetadataValue(flag=value)
        case int():
            return shard_pb2.MetadataValue(number=value)
        case str():
            return shard_pb2.MetadataValue(text=value)


class _RequestDefaults:
    """Pairs of a field's name and its value. Those that no request could send are dropped."""

    def put(self, value: RequestDefaults, into: dict[str, Any]) -> None:
        into["request_defaults"] = dict(value)

    def take(self, message: shard_pb2.ModelInfo) -> RequestDefaults:
        return valid_defaults(message.request_defaults)


CONSTRAINT = ConstraintCodec()
THOUGHT = Codec(Thought, types_pb2.Thought, named={"ending": "ending_token_ids"})
SAMPLING = Codec(SamplingParams, types_pb2.SamplingParameters, named={"biases": Columns("bias_token_ids", "biases")})

LAYOUT_LIMITS = Codec(
    LayoutLimits,
    shard_pb2.LayoutLimits,
    named={
        "layout": Named("kv_layout", shard_pb2.LayoutLimits, KvLayout, KvLayout.UNIFIED),
        "whole_only": Switch(
            "prefix_sharing", on=shard_pb2.PREFIX_SHARING_WHOLE_ONLY, off=shard_pb2.PREFIX_SHARING_ANY
        ),
        "saving": Named("run_saving", shard_pb2.LayoutLimits, Saving, Saving.NOTHING),
    },
)
SAVED_BYTES = Codec(SavedBytes, shard_pb2.SavedBytes)
LIMITS = Codec(Limits, shard_pb2.Limits, inner=[LAYOUT_LIMITS, SAVED_BYTES])
FILL_TOKENS = Codec(FillTokens, shard_pb2.FillTokens)
MEDIA_FACTS = Codec(MediaFacts, shard_pb2.MediaFacts)
MODEL = Codec(
    ModelFile,
    shard_pb2.ModelInfo,
    named={
        "eos_token_ids": "eog_token_ids",
        "fill": "fill_tokens",
        "metadata": _Metadata(),
        "request_defaults": _RequestDefaults(),
    },
    inner=[FILL_TOKENS, MEDIA_FACTS],
)
NUMERICS = Codec(Numerics, shard_pb2.Numerics, named={"kernels": Named("kernels", shard_pb2.Numerics, Kernels, None)})
INFO = Codec(Info, shard_pb2.InfoResponse, inner=[MODEL, LIMITS, NUMERICS])
STATUS = Codec(ShardStatus, shard_pb2.WatchResponse, named={"claim": _Claim()})
TOKENIZED_TEXT = Codec(TokenizedText, shard_pb2.TokenizeResponse)
MEDIA_SPAN = Codec(MediaSpan, types_pb2.MediaSpan)
MEDIA_SHAPE = Codec(
    MediaShape, shard_pb2.MediaShape, named={"kind": Named("kind", shard_pb2.MediaShape, MediaKind, None)}
)
TEXT_PART = Codec(TextPart, shard_pb2.TextPart)
TOKENIZED_PARTS = Codec(TokenizedParts, shard_pb2.TokenizePartsResponse, inner=[MEDIA_SPAN])
ENCODED_MEDIA = Codec(EncodedMedia, shard_pb2.EncodeMediaResponse, named={"seconds": Nanoseconds("encode_ns")})

HEADER = Codec(
    Header,
    types_pb2.CommandHeader,
    named={
        "release": "release_sequence_ids",
        "park": Pairs("park", types_pb2.ParkedSequence, "sequence_id", "length"),
    },
)
COPY = Codec(PrefixCopy, types_pb2.PrefixCopy, named={"source_id": "source_sequence_id"})
PARAMETERS = Codec(
    SequenceParameters,
    types_pb2.SequenceParameters,
    named={"prediction": "predicted_token_ids"},
    inner=[SAMPLING, CONSTRAINT, THOUGHT],
)
CHUNK = Codec(Chunk, types_pb2.PrefillChunk, named={"setup": "parameters"}, inner=[PARAMETERS, COPY, MEDIA_SPAN])
ROW = Codec(Row, shard_pb2.EvaluateRow, inner=[COPY, MEDIA_SPAN])
NOTE = Codec(RunNote, shard_pb2.RunNote, named={"tokens": _TokenArray()})
SAVE_ENTRY = Codec(SaveEntry, shard_pb2.SaveEntry, named={"cuts": Columns("cuts", "keys"), "note": _Note()})
RUN_SLICE = Codec(RunSlice, shard_pb2.RunSlice)
LOAD_ENTRY = Codec(LoadEntry, shard_pb2.LoadEntry, inner=[RUN_SLICE, COPY, MEDIA_SPAN])
_OWN = ("shard", "command_id")

PREFILL = Codec(
    Prefill, shard_pb2.PrefillRequest, named={"ride": "ride_sequence_ids"}, left_out=_OWN, inner=[HEADER, CHUNK]
)
DECODE = Codec(Decode, shard_pb2.DecodeRequest, left_out=_OWN, inner=[HEADER])
EVALUATE = Codec(Evaluate, shard_pb2.EvaluateRequest, left_out=_OWN, inner=[HEADER, ROW])
FILTER_BATCH = Codec(
    FilterBatch, shard_pb2.FilterBatchRequest, named={"keep": "keep_sequence_ids"}, left_out=_OWN, inner=[HEADER]
)
SAVE = Codec(Save, shard_pb2.SaveRequest, left_out=_OWN, inner=[HEADER, SAVE_ENTRY])
LOAD = Codec(Load, shard_pb2.LoadRequest, left_out=_OWN, inner=[HEADER, LOAD_ENTRY])
SET_LAYOUT = Codec(
    SetLayout,
    shard_pb2.SetLayoutRequest,
    named={"layout": Named("kv_layout", shard_pb2.SetLayoutRequest, KvLayout, None)},
    left_out=_OWN,
    inner=[HEADER],
)
_COMMANDS: dict[type, Codec[Any, Any]] = {
    codec.kind: codec for codec in (PREFILL, DECODE, EVALUATE, FILTER_BATCH, SAVE, LOAD, SET_LAYOUT)
}

HOLDINGS = Codec(Holdings, shard_pb2.FilterBatchResponse)
SAVED = Codec(
    Saved,
    shard_pb2.SaveResponse,
    named={"sizes_bytes": "bytes", "seconds": Nanoseconds("total_ns")},
    left_out=_OWN,
)
LOADED = Codec(Loaded, shard_pb2.LoadResponse, named={"seconds": Nanoseconds("total_ns")}, left_out=_OWN)
LAYOUT_SET = Codec(
    LayoutSet,
    shard_pb2.SetLayoutResponse,
    named={"layout": "limits", "lost": "lost_sequence_ids", "seconds": Nanoseconds("total_ns")},
    left_out=_OWN,
    inner=[LAYOUT_LIMITS],
)


def encode_command(command: Command, epoch: int) -> Any:
    """Return the request that carries ``command`` under the lease of ``epoch``."""
    request = _COMMANDS[type(command)].encode(command)
    request.header.epoch = epoch
    return request


def encode_parts(parts: Sequence[PromptPart]) -> shard_pb2.TokenizePartsRequest:
    """Return the request to tokenize a prompt of these parts."""
    request = shard_pb2.TokenizePartsRequest()
    for part in parts:
        match part:
            case TextPart():
                request.parts.add(text=TEXT_PART.encode(part))
            case MediaShape():
                request.parts.add(media=MEDIA_SHAPE.encode(part))
    return request


def decode_parts(request: shard_pb2.TokenizePartsRequest) -> list[PromptPart]:
    """Return what `encode_parts` encoded. Raises MalformedError."""
    parts: list[PromptPart] = []
    for part in request.parts:
        match part.WhichOneof("kind"):
            case "text":
                parts.append(TEXT_PART.decode(part.text))
            case "media":
                parts.append(MEDIA_SHAPE.decode(part.media))
            case _:
                raise MalformedError("a part of a prompt is a text or a medium")
    return parts


def as_it_arrives(command: Command) -> Command:
    """Return ``command`` as a shard would get it: in float32, and with the bytes of notes."""
    match command:
        case Prefill():
            return PREFILL.decode(PREFILL.encode(command))
        case Save():
            return SAVE.decode(SAVE.encode(command))
        case _:
            return command


def encode_note(note: RunNote | bytes) -> bytes:
    """Return the bytes that a shard keeps of a note."""
    return note if isinstance(note, bytes) else NOTE.encode(note).SerializeToString()


def decode_note(data: bytes) -> RunNote:
    """Return what `encode_note` encoded."""
    return NOTE.decode(shard_pb2.RunNote.FromString(data))
