"""Decodes protobuf messages into the shard's own types, and encodes results."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import assert_never

import numpy as np

from caravan_proto.shard.v1 import shard_pb2, types_pb2
from caravan_shard.backends.base import (
    Capacity,
    FillTokens,
    LayoutLimits,
    MetadataValue,
    ModelFacts,
    Piece,
    Prefix,
    PrefixSharing,
    RunSaving,
)
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
from caravan_shard.protocol.results import (
    DraftRows,
    Evaluations,
    FinishReason,
    Holdings,
    LayoutSet,
    Loaded,
    PromptLogprobs,
    Saved,
    SavedBytes,
    StepOutcome,
    StepResult,
    Timings,
)
from caravan_shard.protocol.run import Run
from caravan_shard.protocol.sequence_parameters import SequenceParameters
from caravan_shard.sampling.parameters import Biases, SamplingParameters
from caravan_shard.speculation.draft import DraftSource

# A cut takes about 20 bytes: a message stays far below the limit of 4 MiB.
_CUTS_PER_MESSAGE = 20_000
_FINISH = {
    None: types_pb2.FINISH_REASON_UNSPECIFIED,
    FinishReason.EOS: types_pb2.FINISH_REASON_EOS,
    FinishReason.LENGTH: types_pb2.FINISH_REASON_LENGTH,
    FinishReason.STOP_TOKEN: types_pb2.FINISH_REASON_STOP_TOKEN,
}
_ROW_OUTPUTS = {
    shard_pb2.ROW_OUTPUTS_NONE: RowOutputs.NONE,
    shard_pb2.ROW_OUTPUTS_LAST: RowOutputs.LAST,
    shard_pb2.ROW_OUTPUTS_ALL: RowOutputs.ALL,
}
_DRAFT_SOURCES = {
    DraftSource.PREDICTION: types_pb2.DRAFT_SOURCE_PREDICTION,
    DraftSource.CONTEXT: types_pb2.DRAFT_SOURCE_CONTEXT,
    DraftSource.CONSTRAINT: types_pb2.DRAFT_SOURCE_CONSTRAINT,
    DraftSource.MODEL: types_pb2.DRAFT_SOURCE_MODEL,
    DraftSource.POOL: types_pb2.DRAFT_SOURCE_POOL,
}
_LAYOUTS = {KvLayout.UNIFIED: shard_pb2.KV_LAYOUT_UNIFIED, KvLayout.SPLIT: shard_pb2.KV_LAYOUT_SPLIT}
_SHARINGS = {
    PrefixSharing.ANY: shard_pb2.PREFIX_SHARING_ANY,
    PrefixSharing.WHOLE_ONLY: shard_pb2.PREFIX_SHARING_WHOLE_ONLY,
}
_SAVINGS = {
    RunSaving.ANY: shard_pb2.RUN_SAVING_ANY,
    RunSaving.WHOLE_ONLY: shard_pb2.RUN_SAVING_WHOLE_ONLY,
    RunSaving.NOTHING: shard_pb2.RUN_SAVING_NOTHING,
}


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
    layout = next((layout for layout, number in _LAYOUTS.items() if number == request.kv_layout), None)
    return SetLayout(layout=layout, header=_header(request.header))


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


def _outcome(outcome: StepOutcome) -> types_pb2.StepOutcome.ValueType:
    match outcome:
        case StepOutcome.OK:
            return types_pb2.STEP_OUTCOME_OK
        case StepOutcome.NO_KV:
            return types_pb2.STEP_OUTCOME_NO_KV
        case StepOutcome.ABORTED:
            return types_pb2.STEP_OUTCOME_ABORTED
        case _:
            assert_never(outcome)


def _fill_step(message: shard_pb2.PrefillResponse | shard_pb2.DecodeStep, result: StepResult) -> None:
    """Write the parts that all replies to steps have. In place, since protobuf copies messages that it is given."""
    rows, columns = result.rows, message.tokens
    columns.sequence_ids.extend(rows.sequence_ids)
    columns.token_ids.extend(rows.token_ids)
    columns.pieces.extend(rows.pieces)
    columns.specials.extend(rows.specials)
    columns.finish_reasons.extend([_FINISH[reason] for reason in rows.finish_reasons])
    if rows.logprobs:
        columns.logprobs.extend(rows.logprobs)
        columns.top_counts.extend(rows.top_counts)
        columns.top_token_ids.extend(rows.top_token_ids)
        columns.top_logprobs.extend(rows.top_logprobs)
        columns.top_pieces.extend(rows.top_pieces)
        columns.top_specials.extend(rows.top_specials)
    _fill_timings(message.timings, result.timings)


def _fill_timings(message: types_pb2.StepTimings, timings: Timings) -> None:
    message.forward_ns = timings.forward_ns
    message.sample_ns = timings.sample_ns
    message.total_ns = timings.total_ns


def _draft_columns(rows: DraftRows) -> types_pb2.DraftColumns:
    return types_pb2.DraftColumns(
        sequence_ids=rows.sequence_ids,
        sources=[_DRAFT_SOURCES[source] for source in rows.sources],
        drafted=rows.drafted,
        accepted=rows.accepted,
    )


def _prompt_columns(rows: PromptLogprobs) -> types_pb2.PromptColumns:
    return types_pb2.PromptColumns(
        sequence_ids=rows.sequence_ids,
        counts=rows.counts,
        logprobs=rows.logprobs,
        top_counts=rows.top_counts,
        top_token_ids=rows.top_token_ids,
        top_logprobs=rows.top_logprobs,
        top_pieces=rows.top_pieces,
        top_specials=rows.top_specials,
    )


def prefill_response(result: StepResult) -> shard_pb2.PrefillResponse:
    """Encode the reply to Prefill."""
    message = shard_pb2.PrefillResponse(
        outcome=_outcome(result.outcome),
        prompt=_prompt_columns(result.prompt_logprobs) if result.prompt_logprobs is not None else None,
    )
    _fill_step(message, result)
    return message


def evaluate_response(result: StepResult) -> shard_pb2.EvaluateResponse:
    """Encode the reply to Evaluate."""
    message = shard_pb2.EvaluateResponse(
        outcome=_outcome(result.outcome),
        evaluations=_evaluation_columns(result.evaluations) if result.evaluations is not None else None,
    )
    _fill_timings(message.timings, result.timings)
    return message


def _evaluation_columns(rows: Evaluations) -> types_pb2.EvaluationColumns:
    return types_pb2.EvaluationColumns(
        sequence_ids=rows.sequence_ids,
        counts=rows.counts,
        logprobs=rows.logprobs,
        top_counts=rows.top_counts,
        top_token_ids=rows.top_token_ids,
        top_logprobs=rows.top_logprobs,
        top_pieces=rows.top_pieces,
        top_specials=rows.top_specials,
        score_logprobs=rows.score_logprobs,
    )


def decode_response(results: Iterable[StepResult]) -> shard_pb2.DecodeResponse:
    """Encode one reply to Decode."""
    message = shard_pb2.DecodeResponse()
    for result in results:
        step = message.steps.add()
        step.outcome = _outcome(result.outcome)
        _fill_step(step, result)
        if result.drafts is not None:
            step.drafts.CopyFrom(_draft_columns(result.drafts))
    return message


def filter_response(holdings: Holdings) -> shard_pb2.FilterBatchResponse:
    """Encode the reply to FilterBatch."""
    return shard_pb2.FilterBatchResponse(free_cells=holdings.free_cells, sequence_ids=holdings.sequence_ids)


def save_response(result: Saved) -> shard_pb2.SaveResponse:
    """Encode the reply to Save."""
    return shard_pb2.SaveResponse(
        saved=[size is not None for size in result.sizes],
        bytes=[size or 0 for size in result.sizes],
        total_ns=result.total_ns,
    )


def load_response(result: Loaded) -> shard_pb2.LoadResponse:
    """Encode the reply to Load."""
    return shard_pb2.LoadResponse(
        loaded=result.loaded,
        bad_runs=result.bad_runs,
        total_ns=result.total_ns,
    )


def layout_response(result: LayoutSet) -> shard_pb2.SetLayoutResponse:
    """Encode the reply to SetLayout."""
    return shard_pb2.SetLayoutResponse(
        limits=_layout_limits(result.limits), lost_sequence_ids=result.lost_ids, total_ns=result.total_ns
    )


def runs_responses(runs: Sequence[tuple[Run, bool]]) -> Iterator[shard_pb2.ListRunsResponse]:
    """Encode runs, each with whether it is on disk, as the messages of ListRuns."""
    first = cuts = 0
    for place, (run, _) in enumerate(runs):
        cuts += len(run.cuts)
        if cuts >= _CUTS_PER_MESSAGE or place == len(runs) - 1:
            yield _runs_response(runs[first : place + 1])
            first, cuts = place + 1, 0


def _runs_response(runs: Sequence[tuple[Run, bool]]) -> shard_pb2.ListRunsResponse:
    return shard_pb2.ListRunsResponse(
        starts=[run.start for run, _ in runs],
        bytes=[run.size for run, _ in runs],
        on_disk=[on_disk for _, on_disk in runs],
        cut_counts=[len(run.cuts) for run, _ in runs],
        cuts=[cut for run, _ in runs for cut in run.cuts],
        keys=[key for run, _ in runs for key in run.keys],
    )


def _saved_bytes(saved: SavedBytes) -> shard_pb2.SavedBytes:
    return shard_pb2.SavedBytes(memory=saved.memory, disk=saved.disk)


def model_info(facts: ModelFacts) -> shard_pb2.ModelInfo:
    """Encode the model for Info."""
    return shard_pb2.ModelInfo(
        name=facts.name,
        fingerprint=facts.fingerprint,
        vocabulary_size=facts.vocabulary_size,
        trained_context=facts.trained_context,
        chat_template=facts.chat_template,
        bos_text=facts.bos_text,
        eos_text=facts.eos_text,
        eog_token_ids=sorted(facts.eog_ids),
        architecture=facts.architecture,
        adapters=facts.adapters,
        draft_model=facts.draft_model,
        parameter_count=facts.parameter_count,
        weight_bytes=facts.weight_bytes,
        quantization=facts.quantization,
        modified_s=facts.modified_s,
        device_bytes=facts.device_bytes,
        metadata={key: _metadata_value(value) for key, value in facts.metadata},
        fill_tokens=None if facts.fill is None else _fill_tokens(facts.fill),
    )


def _fill_tokens(fill: FillTokens) -> shard_pb2.FillTokens:
    return shard_pb2.FillTokens(
        prefix=fill.prefix,
        suffix=fill.suffix,
        middle=fill.middle,
        begin=fill.begin,
        repository=fill.repository,
        file=fill.file,
    )


def _metadata_value(value: MetadataValue) -> shard_pb2.MetadataValue:
    match value:
        case bool():
            return shard_pb2.MetadataValue(flag=value)
        case int():
            return shard_pb2.MetadataValue(number=value)
        case str():
            return shard_pb2.MetadataValue(text=value)
        case _:
            assert_never(value)


def limits(
    capacity: Capacity,
    *,
    max_top_n_tokens: int,
    max_tokenize_bytes: int,
    saved_capacity: SavedBytes,
    run_fingerprint: str,
) -> shard_pb2.Limits:
    """Encode the limits for Info."""
    return shard_pb2.Limits(
        max_sequences=capacity.max_sequences,
        max_batch_tokens=capacity.max_batch_tokens,
        max_top_n_tokens=max_top_n_tokens,
        max_tokenize_bytes=max_tokenize_bytes,
        max_prompt_logprob_tokens=capacity.max_prompt_logprob_tokens,
        embedding_size=capacity.embedding_size,
        max_embed_tokens=capacity.max_embed_tokens,
        max_draft_tokens=capacity.max_draft_tokens,
        layouts=[_layout_limits(limits) for limits in capacity.layouts],
        saved_capacity=_saved_bytes(saved_capacity),
        run_fingerprint=run_fingerprint,
        ranks=capacity.ranks,
    )


def _layout_limits(limits: LayoutLimits) -> shard_pb2.LayoutLimits:
    return shard_pb2.LayoutLimits(
        kv_layout=_LAYOUTS[limits.layout],
        cells=limits.cells,
        cells_per_sequence=limits.cells_per_sequence,
        prefix_sharing=_SHARINGS[limits.sharing],
        run_saving=_SAVINGS[limits.saving],
    )


def detokenize_response(pieces: Sequence[Piece]) -> shard_pb2.DetokenizeResponse:
    """Encode the reply to Detokenize."""
    return shard_pb2.DetokenizeResponse(
        text=b"".join(piece.data for piece in pieces),
        pieces=[piece.data for piece in pieces],
        specials=[piece.special for piece in pieces],
    )


def tokenize_response(token_ids: Sequence[int], pieces: Sequence[Piece]) -> shard_pb2.TokenizeResponse:
    """Encode the reply to Tokenize."""
    return shard_pb2.TokenizeResponse(
        token_ids=token_ids,
        pieces=[piece.data for piece in pieces],
        specials=[piece.special for piece in pieces],
    )
