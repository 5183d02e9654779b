"""Decodes the replies of a shard: those to commands, and its saved runs."""

from caravan_proto.messages.results import DraftCount, DraftSource, FinishReason, StepOutcome
from caravan_proto.shard.v1 import shard_pb2, types_pb2
from caravan_proto.wire import decode_note
from caravan_router.engine.step_columns import (
    alternatives_of,
    drafts_of,
    feedback_of,
    prompt_logprobs_of,
    tokens_of,
)
from caravan_scheduler.events import SavedRun, Stepped

_FINISH = {
    types_pb2.FINISH_REASON_UNSPECIFIED: None,
    types_pb2.FINISH_REASON_EOS: FinishReason.EOS_TOKEN,
    types_pb2.FINISH_REASON_LENGTH: FinishReason.LENGTH,
    types_pb2.FINISH_REASON_STOP_TOKEN: FinishReason.STOP_TOKEN,
    types_pb2.FINISH_REASON_CONSTRAINT_FAILED: FinishReason.CONSTRAINT_FAILED,
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
    types_pb2.STEP_OUTCOME_MEDIA_MISSING: StepOutcome.MEDIA_MISSING,
    types_pb2.STEP_OUTCOME_MEDIA_MISSING: StepOutcome.MEDIA_MISSING,
}


def stepped(message: shard_pb2.PrefillResponse | shard_pb2.DecodeStep, *, shard: str, command_id: int) -> Stepped:
    """Decode the reply to Prefill, or a step of a Decode."""
    timings = message.timings
    return Stepped(
        shard=shard,
        command_id=command_id,
        outcome=_OUTCOME[message.outcome],
        tokens=tokens_of(message.tokens, map(_FINISH.__getitem__, message.tokens.finish_reasons[:])),
        seconds=timings.total_ns / 1e9,
        forward_s=timings.forward_ns / 1e9,
        sample_s=timings.sample_ns / 1e9,
        prompt_logprobs=prompt_logprobs_of(message.prompt) if isinstance(message, shard_pb2.PrefillResponse) else (),
        drafts=_drafts(message.drafts) if isinstance(message, shard_pb2.DecodeStep) else (),
        feedback=feedback_of(message.tokens),
        without_logits=tuple(message.tokens.without_logits_sequence_ids),
        missing_media=tuple(message.missing_media_ids) if isinstance(message, shard_pb2.PrefillResponse) else (),
    )


def _drafts(columns: types_pb2.DraftColumns) -> tuple[tuple[int, DraftCount], ...]:
    return drafts_of(columns, map(_DRAFT_SOURCES.__getitem__, columns.sources))


def evaluated(message: shard_pb2.EvaluateResponse, *, shard: str, command_id: int) -> Stepped:
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
        evaluations=tuple(zip(columns.sequence_ids, alternatives_of(columns), strict=True)),
        missing_media=tuple(message.missing_media_ids),
    )


def saved_runs(message: shard_pb2.ListRunsResponse) -> list[SavedRun]:
    """Decode a part of the reply to ListRuns."""
    cuts = list(zip(message.cuts, message.keys, strict=True))
    runs: list[SavedRun] = []
    at = 0
    for start, size, on_disk, count, note in zip(
        message.starts, message.bytes, message.on_disk, message.cut_counts, message.notes, strict=True
    ):
        runs.append(
            SavedRun(
                start=start,
                cuts=tuple(cuts[at : at + count]),
                size_bytes=size,
                on_disk=on_disk,
                note=decode_note(note),
            )
        )
        at += count
    return runs
