"""Encodes what the shard says of itself: model, limits, saved runs."""

from collections.abc import Iterator, Sequence
from typing import assert_never

from caravan_proto.shard.v1 import shard_pb2
from caravan_shard.backends.base import (
    Capacity,
    FillTokens,
    LayoutLimits,
    MetadataValue,
    ModelFacts,
    PrefixSharing,
    RunSaving,
)
from caravan_shard.kv_layout import KvLayout
from caravan_shard.protocol.results import SavedBytes
from caravan_shard.protocol.run import Run

# A cut takes about 20 bytes: a message stays far below the limit of 4 MiB.
_CUTS_PER_MESSAGE = 20_000
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
        layouts=[layout_limits(limits) for limits in capacity.layouts],
        saved_capacity=_saved_bytes(saved_capacity),
        run_fingerprint=run_fingerprint,
        ranks=capacity.ranks,
    )


def layout_limits(limits: LayoutLimits) -> shard_pb2.LayoutLimits:
    """Encode the limits of one layout."""
    return shard_pb2.LayoutLimits(
        kv_layout=_LAYOUTS[limits.layout],
        cells=limits.cells,
        cells_per_sequence=limits.cells_per_sequence,
        prefix_sharing=_SHARINGS[limits.sharing],
        run_saving=_SAVINGS[limits.saving],
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
