"""Encodes commands as protobuf messages and decodes replies. Only this module and the client import protobuf."""

import hashlib
import math

from caravan_proto.shard.v1 import shard_pb2, types_pb2
from caravan_router.core.constraint import Constraint, ConstraintKind
from caravan_router.core.engine import FillTokens, ModelFacts
from caravan_router.core.sampling import FinishReason
from caravan_router.core.speculation import DraftCount, DraftSource
from caravan_router.core.thought import Thought
from caravan_router.core.tokens import Alternative, GeneratedToken, PromptToken
from caravan_router.engine.shard_info import ShardInfo, ShardStatus, ShardWish
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
from caravan_router.scheduling.events import (
    LayoutLimits,
    LayoutSet,
    Loaded,
    Saved,
    SavedRun,
    Saving,
    ShardLimits,
    StepOutcome,
    Stepped,
)

_POOL_BYTES = 16
_FINISH = {
    types_pb2.FINISH_REASON_UNSPECIFIED: None,
    types_pb2.FINISH_REASON_EOS: FinishReason.EOS_TOKEN,
    types_pb2.FINISH_REASON_LENGTH: FinishReason.LENGTH,
    types_pb2.FINISH_REASON_STOP_TOKEN: FinishReason.STOP_TOKEN,
}
_DRAFT_SOURCES = {
    types_pb2.DRAFT_SOURCE_PREDICTION: DraftSource.PREDICTION,
    types_pb2.DRAFT_SOURCE_CONTEXT: DraftSource.CONTEXT,
    types_pb2.DRAFT_SOURCE_CONSTRAINT: DraftSource.CONSTRAINT,
    types_pb2.DRAFT_SOURCE_MODEL: DraftSource.MODEL,
    types_pb2.DRAFT_SOURCE_POOL: DraftSource.POOL,
}
_OUTCOME = {
    types_pb2.STEP_OUTCOME_OK: StepOutcome.OK,
    types_pb2.STEP_OUTCOME_NO_KV: StepOutcome.NO_KV,
    types_pb2.STEP_OUTCOME_ABORTED: StepOutcome.ABORTED,
}


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


def stepped(shard: str, command_id: int, message: shard_pb2.PrefillResponse | shard_pb2.DecodeStep) -> Stepped:
    """Decode the reply to Prefill, or a step of a Decode."""
    timings = message.timings
    return Stepped(
        shard=shard,
        command_id=command_id,
        outcome=_OUTCOME[message.outcome],
        tokens=_tokens(message.tokens),
        seconds=timings.total_ns / 1e9,
        forward_s=timings.forward_ns / 1e9,
        sample_s=timings.sample_ns / 1e9,
        prompt_logprobs=_prompt_logprobs(message.prompt) if isinstance(message, shard_pb2.PrefillResponse) else (),
        drafts=_drafts(message.drafts) if isinstance(message, shard_pb2.DecodeStep) else (),
    )


def evaluated(shard: str, command_id: int, message: shard_pb2.EvaluateResponse) -> Stepped:
    """Decode the reply to Evaluate, whose rows have one output at most."""
    columns, timings = message.evaluations, message.timings
    return Stepped(
        shard=shard,
        command_id=command_id,
        outcome=_OUTCOME[message.outcome],
        tokens=(),
        seconds=timings.total_ns / 1e9,
        forward_s=timings.forward_ns / 1e9,
        sample_s=timings.sample_ns / 1e9,
        evaluations=tuple(zip(columns.sequence_ids, _alternatives(columns), strict=True)),
    )


def _drafts(columns: types_pb2.DraftColumns) -> tuple[tuple[int, DraftCount], ...]:
    if not columns.sequence_ids:
        return ()
    rows = zip(columns.sequence_ids, columns.sources, columns.drafted, columns.accepted, strict=True)
    return tuple(
        (sequence_id, DraftCount(_DRAFT_SOURCES[source], drafted, accepted))
        for sequence_id, source, drafted, accepted in rows
    )


def saved(shard: str, command_id: int, message: shard_pb2.SaveResponse) -> Saved:
    """Decode the reply to Save."""
    return Saved(
        shard=shard,
        command_id=command_id,
        saved=tuple(message.saved),
        sizes_bytes=tuple(message.bytes),
        seconds=message.total_ns / 1e9,
    )


def loaded(shard: str, command_id: int, message: shard_pb2.LoadResponse) -> Loaded:
    """Decode the reply to Load."""
    return Loaded(
        shard=shard,
        command_id=command_id,
        loaded=tuple(message.loaded),
        bad_runs=tuple(message.bad_runs),
        seconds=message.total_ns / 1e9,
    )


def layout_set(shard: str, command_id: int, message: shard_pb2.SetLayoutResponse) -> LayoutSet:
    """Decode the reply to SetLayout."""
    return LayoutSet(
        shard=shard,
        command_id=command_id,
        layout=_layout(message.limits),
        lost=tuple(message.lost_sequence_ids),
        seconds=message.total_ns / 1e9,
    )


def saved_runs(message: shard_pb2.ListRunsResponse) -> list[SavedRun]:
    """Decode a part of the reply to ListRuns."""
    cuts = list(zip(message.cuts, message.keys, strict=True))
    runs: list[SavedRun] = []
    at = 0
    for start, size, on_disk, count in zip(
        message.starts, message.bytes, message.on_disk, message.cut_counts, strict=True
    ):
        runs.append(SavedRun(start=start, cuts=tuple(cuts[at : at + count]), size_bytes=size, on_disk=on_disk))
        at += count
    return runs


_SAVING = {
    shard_pb2.RUN_SAVING_ANY: Saving.ANY,
    shard_pb2.RUN_SAVING_WHOLE_ONLY: Saving.WHOLE_ONLY,
}


def _layout(message: shard_pb2.LayoutLimits) -> LayoutLimits:
    return LayoutLimits(
        cells=message.cells,
        cells_per_sequence=message.cells_per_sequence,
        shares_cells=message.kv_layout != shard_pb2.KV_LAYOUT_SPLIT,
        whole_only=message.prefix_sharing != shard_pb2.PREFIX_SHARING_ANY,
        saving=_SAVING.get(message.run_saving, Saving.NOTHING),
    )


def _prompt_logprobs(columns: types_pb2.PromptColumns) -> tuple[tuple[int, tuple[PromptToken, ...]], ...]:
    tokens = [
        PromptToken(None if math.isnan(logprob) else logprob, top)
        for logprob, top in zip(columns.logprobs, _alternatives(columns), strict=True)
    ]
    rows, start = [], 0
    for sequence_id, count in zip(columns.sequence_ids, columns.counts, strict=True):
        rows.append((sequence_id, tuple(tokens[start : start + count])))
        start += count
    return tuple(rows)


def _tokens(columns: types_pb2.TokenColumns) -> tuple[tuple[int, GeneratedToken], ...]:
    # Slices make lists at once; protobuf's iterators look up element by element.
    sequence_ids = columns.sequence_ids[:]
    logprobs = [None if math.isnan(value) else value for value in columns.logprobs] or [None] * len(sequence_ids)
    alternatives = _alternatives(columns) if columns.top_counts else [()] * len(sequence_ids)
    return tuple(
        [
            (sequence_id, GeneratedToken(token_id, piece, special, logprob, top, _FINISH[end]))
            for sequence_id, token_id, piece, special, logprob, top, end in zip(
                sequence_ids,
                columns.token_ids[:],
                columns.pieces[:],
                columns.specials[:],
                logprobs,
                alternatives,
                columns.finish_reasons[:],
                strict=True,
            )
        ]
    )


def _alternatives(
    columns: types_pb2.TokenColumns | types_pb2.PromptColumns | types_pb2.EvaluationColumns,
) -> tuple[tuple[Alternative, ...], ...]:
    flat = [
        Alternative(*fields)
        for fields in zip(
            columns.top_token_ids, columns.top_pieces, columns.top_specials, columns.top_logprobs, strict=True
        )
    ]
    rows, start = [], 0
    for count in columns.top_counts:
        rows.append(tuple(flat[start : start + count]))
        start += count
    return tuple(rows)


def _fill_tokens(message: shard_pb2.FillTokens) -> FillTokens:
    return FillTokens(
        prefix=message.prefix,
        suffix=message.suffix,
        middle=message.middle,
        begin=message.begin if message.HasField("begin") else None,
        repository=message.repository if message.HasField("repository") else None,
        file=message.file if message.HasField("file") else None,
    )


def shard_info(message: shard_pb2.InfoResponse) -> ShardInfo:
    """Decode the reply to Info."""
    limits, model = message.limits, message.model
    return ShardInfo(
        shard_id=message.shard_id,
        version=message.version,
        incarnation=message.incarnation,
        epoch=message.epoch,
        leased=message.leased,
        batch_invariant=message.batch_invariant if message.HasField("batch_invariant") else None,
        limits=_limits(limits),
        facts=ModelFacts(
            name=model.name,
            fingerprint=model.fingerprint,
            vocabulary_size=model.vocabulary_size,
            chat_template=model.chat_template,
            tool_template=model.tool_template,
            bos_text=model.bos_text,
            eos_text=model.eos_text,
            adapters=tuple(model.adapters),
            draft_model=model.draft_model,
            eos_token_ids=frozenset(model.eog_token_ids),
            max_sequence_tokens=max(layout.cells_per_sequence for layout in limits.layouts),
            max_top_n_tokens=limits.max_top_n_tokens,
            max_tokenize_bytes=limits.max_tokenize_bytes,
            total_cells=limits.layouts[0].cells,
            embedding_size=limits.embedding_size,
            max_embed_tokens=limits.max_embed_tokens,
            ranks=limits.ranks,
            fill=_fill_tokens(model.fill_tokens) if model.HasField("fill_tokens") else None,
            architecture=model.architecture,
            parameter_count=model.parameter_count,
            weight_bytes=model.weight_bytes,
            quantization=model.quantization,
            modified_s=model.modified_s,
            device_bytes=model.device_bytes if model.HasField("device_bytes") else None,
            metadata=tuple((key, _metadata_value(value)) for key, value in sorted(model.metadata.items())),
        ),
    )


def _limits(message: shard_pb2.Limits) -> ShardLimits:
    current, *others = (_layout(layout) for layout in message.layouts)
    return ShardLimits(
        layout=current,
        other_layout=others[0] if others else None,
        max_sequences=message.max_sequences,
        max_batch_tokens=message.max_batch_tokens,
        memory_bytes=message.saved_capacity.memory,
        disk_bytes=message.saved_capacity.disk,
        max_prompt_logprob_tokens=max(1, message.max_prompt_logprob_tokens),
        run_fingerprint=message.run_fingerprint,
        max_draft_tokens=message.max_draft_tokens,
    )


def _metadata_value(value: shard_pb2.MetadataValue) -> str | int | bool:
    match value.WhichOneof("value"):
        case "number":
            return value.number
        case "flag":
            return value.flag
        case _:
            return value.text


def shard_status(message: shard_pb2.WatchResponse) -> ShardStatus:
    """Decode a message of Watch."""
    wish = ShardWish(message.wanted_by, message.wanted_urgently) if message.HasField("wanted_by") else None
    return ShardStatus(steps=message.steps, busy=message.busy, draining=message.draining, wish=wish)
