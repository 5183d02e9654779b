"""The reports of a shard about itself: identity, limits, model, progress."""

from dataclasses import dataclass, fields

from caravan_proto.messages.limits import Limits
from caravan_proto.messages.model import Info, ModelFile, Numerics
from caravan_scheduler.core.engine import ModelFacts
from caravan_scheduler.events import ShardLimits


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardInfo:
    """A shard's identity, lease, limits and model.

    ``shard_id`` is its name, ``version`` that of its program. ``incarnation`` is new with every start of its process.
    ``epoch`` numbers its last lease; ``leased`` says whether a router still holds that one, which other routers reach
    at ``holder_url``. ``embed_tokens_at_once``: tokens of all texts that it embeds at the same time.
    """

    shard_id: str
    version: str
    incarnation: str
    epoch: int
    leased: bool
    holder_url: str
    limits: ShardLimits
    embed_tokens_at_once: int
    facts: ModelFacts
    numerics: Numerics

    @staticmethod
    def of(info: Info) -> "ShardInfo":
        """Return what ``info``, the reply to Info, says."""
        return ShardInfo(
            shard_id=info.shard_id,
            version=info.version,
            incarnation=info.incarnation,
            epoch=info.epoch,
            leased=info.leased,
            holder_url=info.holder_url,
            limits=_limits(info.limits, info.model),
            embed_tokens_at_once=info.limits.embed_tokens_at_once,
            facts=_facts(info.model, info.limits),
            numerics=info.numerics,
        )


def _limits(limits: Limits, model: ModelFile) -> ShardLimits:
    current, *others = limits.layouts
    return ShardLimits(
        layout=current,
        other_layout=others[0] if others else None,
        max_sequences=limits.max_sequences,
        max_batch_tokens=limits.max_batch_tokens,
        memory_bytes=limits.saved_capacity.memory,
        disk_bytes=limits.saved_capacity.disk,
        max_prompt_logprob_tokens=max(1, limits.max_prompt_logprob_tokens),
        run_fingerprint=limits.run_fingerprint,
        max_draft_tokens=limits.max_draft_tokens,
        end_tokens=model.eos_token_ids,
        encoder=b"" if model.media is None else model.media.fingerprint,
    )


def _facts(model: ModelFile, limits: Limits) -> ModelFacts:
    return ModelFacts(
        **{one.name: getattr(model, one.name) for one in fields(model)},
        max_sequence_tokens=max(layout.cells_per_sequence for layout in limits.layouts) or limits.max_embed_tokens,
        max_top_n_tokens=limits.max_top_n_tokens,
        max_tokenize_bytes=limits.max_tokenize_bytes,
        total_cells=limits.layouts[0].cells,
        embedding_size=limits.embedding_size,
        max_embed_tokens=limits.max_embed_tokens,
        ranks=limits.ranks,
        generates=limits.max_sequences > 0,
    )
