"""Encodes saved runs and the results of commands as protobuf messages."""

from collections.abc import Iterable, Iterator, Sequence

from caravan_proto.messages.results import DraftSource, FinishReason, StepOutcome
from caravan_proto.shard.v1 import shard_pb2, types_pb2
from caravan_shard.protocol.commands import StoredRun
from caravan_shard.protocol.results import LogprobColumns, StepResult, StepTimings

_CUT_BYTES = 20
# A message ends with the run that makes it this large. That is far below the limit, since a run may have a long note.
_MESSAGE_BYTES = 1 << 19

_FINISH = {
    None: types_pb2.FINISH_REASON_UNSPECIFIED,
    FinishReason.EOS_TOKEN: types_pb2.FINISH_REASON_EOS,
    FinishReason.LENGTH: types_pb2.FINISH_REASON_LENGTH,
    FinishReason.STOP_TOKEN: types_pb2.FINISH_REASON_STOP_TOKEN,
    FinishReason.CONSTRAINT_FAILED: types_pb2.FINISH_REASON_CONSTRAINT_FAILED,
}
_DRAFT_SOURCES = {
    DraftSource.PREDICTION: types_pb2.DRAFT_SOURCE_PREDICTION,
    DraftSource.CONTEXT: types_pb2.DRAFT_SOURCE_CONTEXT,
    DraftSource.CONSTRAINT: types_pb2.DRAFT_SOURCE_CONSTRAINT,
    DraftSource.MODEL: types_pb2.DRAFT_SOURCE_MODEL,
    DraftSource.POOL: types_pb2.DRAFT_SOURCE_POOL,
}
_OUTCOMES = {
    StepOutcome.OK: types_pb2.STEP_OUTCOME_OK,
    StepOutcome.NO_KV: types_pb2.STEP_OUTCOME_NO_KV,
    StepOutcome.ABORTED: types_pb2.STEP_OUTCOME_ABORTED,
    StepOutcome.MEDIA_MISSING: types_pb2.STEP_OUTCOME_MEDIA_MISSING,
}


def runs_responses(runs: Sequence[tuple[StoredRun, bool]]) -> Iterator[shard_pb2.ListRunsResponse]:
    """Encode runs, each with whether it is on disk, as the messages of ListRuns."""
    first = size = 0
    for place, (run, _) in enumerate(runs):
        size += len(run.cuts) * _CUT_BYTES + len(run.note)
        if size >= _MESSAGE_BYTES or place == len(runs) - 1:
            yield _runs_response(runs[first : place + 1])
            first, size = place + 1, 0


def _runs_response(runs: Sequence[tuple[StoredRun, bool]]) -> shard_pb2.ListRunsResponse:
    return shard_pb2.ListRunsResponse(
        starts=[run.start for run, _ in runs],
        bytes=[run.size for run, _ in runs],
        on_disk=[on_disk for _, on_disk in runs],
        cut_counts=[len(run.cuts) for run, _ in runs],
        cuts=[cut for run, _ in runs for cut in run.cuts],
        keys=[key for run, _ in runs for key in run.keys],
        notes=[run.note for run, _ in runs],
    )


def _fill_step(message: shard_pb2.PrefillResponse | shard_pb2.DecodeStep, result: StepResult) -> None:
    """Write the parts that all replies to steps have. In place, since protobuf copies messages that it is given."""
    rows, columns = result.rows, message.tokens
    columns.sequence_ids.extend(rows.sequence_ids)
    columns.token_ids.extend(rows.token_ids)
    columns.pieces.extend(rows.pieces)
    columns.specials.extend(rows.specials)
    columns.finish_reasons.extend([_FINISH[reason] for reason in rows.finish_reasons])
    if rows.feedback:
        columns.feedback.extend(rows.feedback)
    if rows.without_logits:
        columns.without_logits_sequence_ids.extend(rows.without_logits)
    if rows.logprobs:
        _fill_logprobs(columns, rows)
    _fill_timings(message.timings, result.timings)


def _fill_logprobs(
    columns: types_pb2.TokenColumns | types_pb2.PromptColumns | types_pb2.EvaluationColumns,
    rows: LogprobColumns,
) -> None:
    columns.logprobs.extend(rows.logprobs)
    columns.top_counts.extend(rows.top_counts)
    columns.top_token_ids.extend(rows.top_token_ids)
    columns.top_logprobs.extend(rows.top_logprobs)
    columns.top_pieces.extend(rows.top_pieces)
    columns.top_specials.extend(rows.top_specials)


def _fill_timings(message: types_pb2.StepTimings, timings: StepTimings) -> None:
    message.forward_ns = timings.forward_ns
    message.sample_ns = timings.sample_ns
    message.total_ns = timings.total_ns


def prefill_response(result: StepResult) -> shard_pb2.PrefillResponse:
    """Encode the reply to Prefill."""
    message = shard_pb2.PrefillResponse(outcome=_OUTCOMES[result.outcome])
    if (rows := result.prompt_logprobs) is not None:
        message.prompt.sequence_ids.extend(rows.sequence_ids)
        message.prompt.counts.extend(rows.counts)
        _fill_logprobs(message.prompt, rows)
    message.missing_media_ids.extend(result.missing_media)
    _fill_step(message, result)
    return message


def evaluate_response(result: StepResult) -> shard_pb2.EvaluateResponse:
    """Encode the reply to Evaluate."""
    message = shard_pb2.EvaluateResponse(outcome=_OUTCOMES[result.outcome])
    if (rows := result.evaluations) is not None:
        message.evaluations.sequence_ids.extend(rows.sequence_ids)
        message.evaluations.counts.extend(rows.counts)
        message.evaluations.score_logprobs.extend(rows.score_logprobs)
        _fill_logprobs(message.evaluations, rows)
    message.missing_media_ids.extend(result.missing_media)
    _fill_timings(message.timings, result.timings)
    return message


def decode_response(results: Iterable[StepResult]) -> shard_pb2.DecodeResponse:
    """Encode one reply to Decode."""
    message = shard_pb2.DecodeResponse()
    for result in results:
        step = message.steps.add()
        step.outcome = _OUTCOMES[result.outcome]
        _fill_step(step, result)
        if (drafts := result.drafts) is not None:
            step.drafts.sequence_ids.extend(drafts.sequence_ids)
            step.drafts.sources.extend([_DRAFT_SOURCES[source] for source in drafts.sources])
            step.drafts.drafted.extend(drafts.drafted)
            step.drafts.accepted.extend(drafts.accepted)
    return message
