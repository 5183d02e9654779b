"""The shards of one model."""

import dataclasses
import logging
from collections.abc import Mapping

from caravan_router.engine.link import ShardLink
from caravan_scheduler.core.engine import ModelFacts

_log = logging.getLogger(__name__)


class Replicas:
    """The links to the shards of one model, and the facts that hold on all of them.

    The facts of a shard stay while it is away, so that answers to clients stay true, until its address is gone.
    The facts of the last shard stay for good, and so does what was once known to be in the model's file.
    """

    def __init__(self, facts: ModelFacts) -> None:
        """``facts``: those of the first shard, which is still to be added."""
        self.facts = facts
        self.links: dict[str, ShardLink] = {}
        self._facts: dict[str, ModelFacts] = {}
        self._loaded: Mapping[str, str] = {}
        self._held = 0
        self._reported: set[str] = set()

    def add(self, link: ShardLink, facts: ModelFacts) -> None:
        """Add a shard, or note its new facts."""
        self.links[link.address] = link
        self._facts[link.address] = facts
        self._combine()
        self._compare_numerics()

    def set_loaded(self, adapters: Mapping[str, str], held: int) -> None:
        """Note the adapters that were loaded while shards ran: the keys of those that are served, by name.

        ``held``: how many each shard has in memory.
        """
        self._loaded, self._held = adapters, held
        if self._facts:
            self._combine()

    def numerics(self, address: str) -> str:
        """Return the fingerprint of how the shard at ``address`` computes; "" if it is not known."""
        link = self.links.get(address)
        return "" if link is None or link.info is None else link.info.numerics.fingerprint

    def _compare_numerics(self) -> None:
        """Log once that shards compute otherwise than the others."""
        found = {numerics for address in self.links if (numerics := self.numerics(address))}
        if len(found) > 1 and not found <= self._reported:
            self._reported |= found
            _log.warning(
                "shards of a model compute with other numerics: where tokens are nearly tied, a text depends on its "
                "shard; see /admin/shards",
                extra={
                    "model": self.facts.name,
                    "numerics": " ".join(f"{address}={self.numerics(address)}" for address in self.links),
                },
            )

    def remove(self, address: str) -> None:
        """Remove the shard at ``address``, which is gone or has another model now."""
        del self.links[address]
        del self._facts[address]
        if self._facts:
            self._combine()

    def _combine(self) -> None:
        every = list(self._facts.values())
        self.facts = dataclasses.replace(
            every[0],
            sha256=self.facts.sha256 or next((facts.sha256 for facts in every if facts.sha256), ""),
            max_sequence_tokens=min(facts.max_sequence_tokens for facts in every),
            max_top_n_tokens=min(facts.max_top_n_tokens for facts in every),
            max_tokenize_bytes=min(facts.max_tokenize_bytes for facts in every),
            total_cells=sum(facts.total_cells for facts in every),
            adapters=(
                *(name for name in every[0].adapters if all(name in facts.adapters for facts in every)),
                *self._loaded,
            ),
            loaded_adapters=self._loaded,
            max_adapters=min(facts.max_adapters for facts in every),
            held_adapters=self._held,
            embedding_size=min(facts.embedding_size for facts in every),
            max_embed_tokens=min(facts.max_embed_tokens for facts in every),
            ranks=all(facts.ranks for facts in every),
            # Prompts with media wait for a shard of the same projector.
            media=next((facts.media for facts in every if facts.media is not None), None),
        )
