"""What is known of the model that the shards serve: replicas of one file, with the smallest limits among them."""

from caravan_router.core.engine import ModelFacts
from caravan_router.engine.codec import ShardInfo


class Fleet:
    """Remembers every shard that was accepted, also while it is away: the facts a client was told stay true."""

    def __init__(self) -> None:
        self._infos: dict[str, ShardInfo] = {}

    def accept(self, address: str, info: ShardInfo) -> str | None:
        """Take in the shard at ``address``, or say why it cannot serve beside the others."""
        for other_address, other in self._infos.items():
            if other_address != address and other.model.fingerprint != info.model.fingerprint:
                return (
                    f"it serves {info.model.name}, {other_address} serves {other.model.name}: all must have one model"
                )
        self._infos[address] = info
        return None

    @property
    def facts(self) -> ModelFacts | None:
        """None until a shard was accepted."""
        if not self._infos:
            return None
        infos = list(self._infos.values())
        model = infos[0].model
        return ModelFacts(
            name=model.name,
            fingerprint=model.fingerprint,
            vocabulary_size=model.vocabulary_size,
            chat_template=model.chat_template,
            bos_text=model.bos_text,
            eos_text=model.eos_text,
            max_sequence_tokens=min(info.limits.cells_per_sequence for info in infos),
            max_top_n_tokens=min(info.max_top_n_tokens for info in infos),
            max_tokenize_bytes=min(info.max_tokenize_bytes for info in infos),
            total_cells=sum(info.limits.cells for info in infos),
            tool_template=model.tool_template,
            adapters=tuple(name for name in model.adapters if all(name in info.model.adapters for info in infos)),
            embedding_size=min(info.embedding_size for info in infos),
            max_embed_tokens=min(info.max_embed_tokens for info in infos),
        )
