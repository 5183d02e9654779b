"""Encodes commands for a shard as protobuf messages."""

import hashlib

from caravan_proto.shard.v1 import shard_pb2, types_pb2
from caravan_router.core.constraint import Constraint, ConstraintKind
from caravan_router.core.thought import Thought
from caravan_router.scheduling.actions import (
    Chunk,
    Decode,
    Evaluate,
    FilterBatch,
    Header,
    Load,
    LoadEntry,
    Prefill,
    PrefixCopy,
    Save,
    SetLayout,
)

_POOL_BYTES = 16
_CONSTRAINT_FIELDS = {
    ConstraintKind.JSON_SCHEMA: "json_schema",
    ConstraintKind.REGEX: "regex",
    ConstraintKind.LARK: "lark",
    ConstraintKind.GBNF: "gbnf",
}


def constraint_message(constraint: Constraint) -> types_pb2.Constraint:
    """Encode a constraint."""
    message = types_pb2.Constraint()
    setattr(message, _CONSTRAINT_FIELDS[constraint.kind], constraint.source)
    return message


def _parameters(chunk: Chunk) -> types_pb2.SequenceParameters | None:
    spec = chunk.setup
    if spec is None:
        return None
    sampling = spec.sampling
    return types_pb2.SequenceParameters(
        sampling=types_pb2.SamplingParameters(
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
            bias_token_ids=[token_id for token_id, _ in sampling.biases],
            biases=[bias for _, bias in sampling.biases],
            repeat_last_n=sampling.repeat_last_n,
            dry_multiplier=sampling.dry_multiplier,
            dry_base=sampling.dry_base,
            dry_allowed_length=sampling.dry_allowed_length,
            dry_penalty_last_n=sampling.dry_penalty_last_n,
            xtc_probability=sampling.xtc_probability,
            xtc_threshold=sampling.xtc_threshold,
        ),
        prompt_length=len(spec.prompt),
        max_length=spec.max_length,
        ignore_eos=spec.stopping.ignore_eos,
        constraint=None if spec.constraint is None else constraint_message(spec.constraint),
        adapter=spec.adapter,
        prompt_logprobs=chunk.prompt_logprobs,
        stop_token_ids=spec.stopping.stop_token_ids,
        min_tokens=spec.stopping.min_tokens,
        traceparent=spec.traceparent,
        max_draft_tokens=spec.max_draft_tokens,
        predicted_token_ids=spec.prediction if spec.max_draft_tokens else (),
        thought=None if spec.thought is None else _thought(spec.thought),
        draft_pool=_draft_pool(spec.namespace) if spec.max_draft_tokens else b"",
    )


def _thought(thought: Thought) -> types_pb2.Thought:
    return types_pb2.Thought(
        closings=[closing.encode() for closing in thought.closings],
        ending_token_ids=thought.ending,
        max_tokens=thought.max_tokens,
    )


def _draft_pool(namespace: str) -> bytes:
    return hashlib.blake2b(namespace.encode(), digest_size=_POOL_BYTES).digest()


def _chunk(chunk: Chunk) -> types_pb2.PrefillChunk:
    return types_pb2.PrefillChunk(
        sequence_id=chunk.sequence_id,
        start=chunk.start,
        token_ids=chunk.token_ids,
        last=chunk.last,
        parameters=_parameters(chunk),
        copy=_copy(chunk.copy),
    )


def _copy(copy: PrefixCopy | None) -> types_pb2.PrefixCopy | None:
    return None if copy is None else types_pb2.PrefixCopy(source_sequence_id=copy.source_id, length=copy.length)


def _header(epoch: int, header: Header) -> types_pb2.CommandHeader:
    return types_pb2.CommandHeader(
        epoch=epoch,
        release_sequence_ids=header.release,
        park=[types_pb2.ParkedSequence(sequence_id=key, length=length) for key, length in header.park],
        drop_runs=header.drop_runs,
        spill_runs=header.spill_runs,
    )


def prefill_request(command: Prefill, epoch: int) -> shard_pb2.PrefillRequest:
    """Encode a Prefill."""
    return shard_pb2.PrefillRequest(
        header=_header(epoch, command.header),
        chunks=[_chunk(chunk) for chunk in command.chunks],
        ride_sequence_ids=command.ride,
    )


def decode_request(command: Decode, epoch: int, reply_interval_ms: int) -> shard_pb2.DecodeRequest:
    """Encode a Decode."""
    return shard_pb2.DecodeRequest(
        header=_header(epoch, command.header),
        sequence_ids=command.sequence_ids,
        max_steps=command.max_steps,
        max_draft_tokens=command.max_draft_tokens,
        reply_interval_ms=reply_interval_ms,
    )


def evaluate_request(command: Evaluate, epoch: int) -> shard_pb2.EvaluateRequest:
    """Encode an Evaluate."""
    return shard_pb2.EvaluateRequest(
        header=_header(epoch, command.header),
        rows=[
            shard_pb2.EvaluateRow(
                sequence_id=row.sequence_id,
                start=row.start,
                token_ids=row.token_ids,
                copy=_copy(row.copy),
                adapter=row.adapter,
                outputs=shard_pb2.ROW_OUTPUTS_LAST if row.top_n_tokens else shard_pb2.ROW_OUTPUTS_NONE,
                top_n_tokens=row.top_n_tokens,
            )
            for row in command.rows
        ],
    )


def filter_batch_request(command: FilterBatch, epoch: int) -> shard_pb2.FilterBatchRequest:
    """Encode a FilterBatch."""
    return shard_pb2.FilterBatchRequest(header=_header(epoch, command.header), keep_sequence_ids=command.keep)


def save_request(command: Save, epoch: int) -> shard_pb2.SaveRequest:
    """Encode a Save."""
    return shard_pb2.SaveRequest(
        header=_header(epoch, command.header),
        entries=[
            shard_pb2.SaveEntry(
                sequence_id=entry.sequence_id,
                start=entry.start,
                cuts=[position for position, _ in entry.cuts],
                keys=[key for _, key in entry.cuts],
                release=entry.release,
            )
            for entry in command.entries
        ],
    )


def load_request(command: Load, epoch: int) -> shard_pb2.LoadRequest:
    """Encode a Load."""
    return shard_pb2.LoadRequest(
        header=_header(epoch, command.header), entries=[_load_entry(entry) for entry in command.entries]
    )


def _load_entry(entry: LoadEntry) -> shard_pb2.LoadEntry:
    return shard_pb2.LoadEntry(
        sequence_id=entry.sequence_id,
        token_ids=entry.token_ids,
        slices=[shard_pb2.RunSlice(key=piece.key, start=piece.start, end=piece.end) for piece in entry.slices],
        adapter=entry.adapter,
    )


def set_layout_request(command: SetLayout, epoch: int) -> shard_pb2.SetLayoutRequest:
    """Encode a SetLayout."""
    layout = shard_pb2.KV_LAYOUT_UNIFIED if command.shares_cells else shard_pb2.KV_LAYOUT_SPLIT
    return shard_pb2.SetLayoutRequest(header=_header(epoch, command.header), kv_layout=layout)
