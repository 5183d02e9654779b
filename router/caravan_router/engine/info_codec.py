"""Decodes what a shard says of itself: model, limits, saved runs, status."""

from caravan_proto.shard.v1 import shard_pb2
from caravan_router.core.engine import FillTokens, ModelFacts
from caravan_router.engine.shard_info import ShardInfo, ShardStatus, ShardWish
from caravan_router.scheduling.events import LayoutLimits, SavedRun, Saving, ShardLimits

_SAVING = {
    shard_pb2.RUN_SAVING_ANY: Saving.ANY,
    shard_pb2.RUN_SAVING_WHOLE_ONLY: Saving.WHOLE_ONLY,
}


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
    current, *others = (layout(one) for one in message.layouts)
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


def layout(message: shard_pb2.LayoutLimits) -> LayoutLimits:
    """Decode the limits of one layout."""
    return LayoutLimits(
        cells=message.cells,
        cells_per_sequence=message.cells_per_sequence,
        shares_cells=message.kv_layout != shard_pb2.KV_LAYOUT_SPLIT,
        whole_only=message.prefix_sharing != shard_pb2.PREFIX_SHARING_ANY,
        saving=_SAVING.get(message.run_saving, Saving.NOTHING),
    )


def _fill_tokens(message: shard_pb2.FillTokens) -> FillTokens:
    return FillTokens(
        prefix=message.prefix,
        suffix=message.suffix,
        middle=message.middle,
        begin=message.begin if message.HasField("begin") else None,
        repository=message.repository if message.HasField("repository") else None,
        file=message.file if message.HasField("file") else None,
    )


def _metadata_value(value: shard_pb2.MetadataValue) -> str | int | bool:
    match value.WhichOneof("value"):
        case "number":
            return value.number
        case "flag":
            return value.flag
        case _:
            return value.text


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


def shard_status(message: shard_pb2.WatchResponse) -> ShardStatus:
    """Decode a message of Watch."""
    wish = ShardWish(message.wanted_by, message.wanted_urgently) if message.HasField("wanted_by") else None
    return ShardStatus(steps=message.steps, busy=message.busy, draining=message.draining, wish=wish)
