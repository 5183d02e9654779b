"""Decodes commands from protobuf messages."""

from collections.abc import Mapping

import numpy as np

from caravan_proto.shard.v1 import shard_pb2, types_pb2
from caravan_shard.backends.base import Prefix
from caravan_shard.constraints.constraint import Constraint, ConstraintKind
from caravan_shard.constraints.grammar import Grammar
from caravan_shard.constraints.thought import Thought
from caravan_shard.kv_layout import KvLayout
from caravan_shard.protocol.commands import (
    Chunk,
    Decode,
    Evaluate,
    FilterBatch,
    Header,
    Load,
    LoadEntry,
    Park,
    Prefill,
    Row,
    RowOutputs,
    RunSlice,
    Save,
    SaveEntry,
    SetLayout,
)
from caravan_shard.protocol.sequence_parameters import SequenceParameters
from caravan_shard.sampling.parameters import Biases, SamplingParameters

_ROW_OUTPUTS = {
    shard_pb2.ROW_OUTPUTS_NONE: RowOutputs.NONE,
    shard_pb2.ROW_OUTPUTS_LAST: RowOutputs.LAST,
    shard_pb2.ROW_OUTPUTS_ALL: RowOutputs.ALL,
}
_LAYOUTS = {shard_pb2.KV_LAYOUT_UNIFIED: KvLayout.UNIFIED, shard_pb2.KV_LAYOUT_SPLIT: KvLayout.SPLIT}


def constraint(message: types_pb2.Constraint) -> Constraint | None:
    """Decode a constraint; None if the message has none."""
    kind = message.WhichOneof("kind")
    return None if kind is None else Constraint(ConstraintKind(kind), getattr(message, kind))


def constraints(request: shard_pb2.PrefillRequest) -> list[Constraint]:
    """Decode the constraints of the sequences that a Prefill starts."""
    messages = (chunk.parameters.constraint for chunk in request.chunks if chunk.parameters.HasField("constraint"))
    return [found for message in messages if (found := constraint(message)) is not None]


def prefill_command(request: shard_pb2.PrefillRequest, grammars: Mapping[Constraint, Grammar]) -> Prefill:
    """Decode a Prefill. ``grammars`` holds the compiled ones of its `constraints`."""
    return Prefill(
        chunks=[_chunk(chunk, grammars) for chunk in request.chunks],
        rider_ids=list(request.ride_sequence_ids),
        header=_header(request.header),
    )


def decode_command(request: shard_pb2.DecodeRequest) -> Decode:
    """Decode the request of a Decode."""
    return Decode(
        sequence_ids=list(request.sequence_ids),
        max_steps=request.max_steps,
        max_draft_tokens=request.max_draft_tokens,
        reply_interval_ns=request.reply_interval_ms * 1_000_000,
        header=_header(request.header),
    )


def evaluate_command(request: shard_pb2.EvaluateRequest) -> Evaluate:
    """Decode an Evaluate."""
    return Evaluate(rows=[_row(row) for row in request.rows], header=_header(request.header))


def _row(row: shard_pb2.EvaluateRow) -> Row:
    return Row(
        sequence_id=row.sequence_id,
        start=row.start,
        tokens=list(row.token_ids),
        outputs=_ROW_OUTPUTS.get(row.outputs),
        copy=_prefix(row),
        adapter=row.adapter,
        top_n=row.top_n_tokens,
        score_ids=list(row.score_token_ids),
        keep_length=row.keep_length if row.HasField("keep_length") else None,
    )


def filter_command(request: shard_pb2.FilterBatchRequest) -> FilterBatch:
    """Decode a FilterBatch."""
    return FilterBatch(keep_ids=list(request.keep_sequence_ids), header=_header(request.header))


def save_command(request: shard_pb2.SaveRequest) -> Save:
    """Decode a Save."""
    return Save(entries=[_save_entry(entry) for entry in request.entries], header=_header(request.header))


def _save_entry(entry: shard_pb2.SaveEntry) -> SaveEntry:
    return SaveEntry(
        sequence_id=entry.sequence_id,
        start=entry.start,
        cuts=tuple(entry.cuts),
        keys=tuple(entry.keys),
        release=entry.release,
    )


def load_command(request: shard_pb2.LoadRequest) -> Load:
    """Decode a Load."""
    return Load(entries=[_load_entry(entry) for entry in request.entries], header=_header(request.header))


def _load_entry(entry: shard_pb2.LoadEntry) -> LoadEntry:
    return LoadEntry(
        sequence_id=entry.sequence_id,
        tokens=list(entry.token_ids),
        slices=[RunSlice(key=piece.key, start=piece.start, end=piece.end) for piece in entry.slices],
        adapter=entry.adapter,
    )


def layout_command(request: shard_pb2.SetLayoutRequest) -> SetLayout:
    """Decode a SetLayout."""
    return SetLayout(layout=_LAYOUTS.get(request.kv_layout), header=_header(request.header))


def _header(header: types_pb2.CommandHeader) -> Header:
    return Header(
        release_ids=list(header.release_sequence_ids),
        parks=[Park(sequence_id=park.sequence_id, length=park.length) for park in header.park],
        dropped_runs=list(header.drop_runs),
        spilled_runs=list(header.spill_runs),
    )


def _prefix(message: types_pb2.PrefillChunk | shard_pb2.EvaluateRow) -> Prefix | None:
    if not message.HasField("copy"):
        return None
    return Prefix(source_id=message.copy.source_sequence_id, length=message.copy.length)


def _chunk(chunk: types_pb2.PrefillChunk, grammars: Mapping[Constraint, Grammar]) -> Chunk:
    return Chunk(
        sequence_id=chunk.sequence_id,
        start=chunk.start,
        tokens=list(chunk.token_ids),
        last=chunk.last,
        parameters=_parameters(chunk.parameters, grammars) if chunk.HasField("parameters") else None,
        copy=_prefix(chunk),
    )


def _parameters(message: types_pb2.SequenceParameters, grammars: Mapping[Constraint, Grammar]) -> SequenceParameters:
    sampling = message.sampling
    found = constraint(message.constraint) if message.HasField("constraint") else None
    return SequenceParameters(
        sampling=SamplingParameters(
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            typical_p=sampling.typical_p,
            min_p=sampling.min_p,
            repetition_penalty=sampling.repetition_penalty,
            frequency_penalty=sampling.frequency_penalty,
            presence_penalty=sampling.presence_penalty,
            seed=sampling.seed,
            logprobs=sampling.logprobs,
            top_n_tokens=sampling.top_n_tokens,
            biases=_biases(sampling),
            repeat_last_n=sampling.repeat_last_n if sampling.HasField("repeat_last_n") else None,
            dry_multiplier=sampling.dry_multiplier,
            dry_base=sampling.dry_base,
            dry_allowed_length=sampling.dry_allowed_length,
            dry_penalty_last_n=sampling.dry_penalty_last_n if sampling.HasField("dry_penalty_last_n") else None,
            xtc_probability=sampling.xtc_probability,
            xtc_threshold=sampling.xtc_threshold,
        ),
        prompt_length=message.prompt_length,
        max_length=message.max_length,
        ignore_eos=message.ignore_eos,
        adapter=message.adapter,
        prompt_logprobs=message.prompt_logprobs,
        stop_token_ids=frozenset(message.stop_token_ids),
        min_tokens=message.min_tokens,
        grammar=None if found is None else grammars[found],
        thought=_thought(message.thought) if message.HasField("thought") else None,
        max_draft_tokens=message.max_draft_tokens,
        predicted=tuple(message.predicted_token_ids),
        draft_pool=message.draft_pool,
        traceparent=message.traceparent,
    )


def _thought(message: types_pb2.Thought) -> Thought:
    return Thought(
        closings=tuple(message.closings),
        ending=tuple(message.ending_token_ids),
        max_tokens=message.max_tokens if message.HasField("max_tokens") else None,
    )


def _biases(sampling: types_pb2.SamplingParameters) -> Biases | None:
    if not (sampling.bias_token_ids or sampling.biases):
        return None
    return Biases(np.array(sampling.bias_token_ids, np.intp), np.array(sampling.biases, np.float32))
