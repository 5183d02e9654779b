"""Decodes the replies of a shard to commands."""

import math

from caravan_proto.shard.v1 import shard_pb2, types_pb2
from caravan_router.core.sampling import FinishReason
from caravan_router.core.speculation import DraftCount, DraftSource
from caravan_router.core.tokens import Alternative, GeneratedToken, PromptToken
from caravan_router.engine import info_codec
from caravan_router.scheduling.events import LayoutSet, Loaded, Saved, StepOutcome, Stepped

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
        layout=info_codec.layout(message.limits),
        lost=tuple(message.lost_sequence_ids),
        seconds=message.total_ns / 1e9,
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
