"""The calls to one shard, wherever it is. Every failure is a ShardRpcError."""

from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Protocol

from caravan_proto.errors import ShardError
from caravan_proto.messages.adapters import AdapterSource, LoadedAdapter
from caravan_proto.messages.commands import Command
from caravan_proto.messages.constraint import Constraint
from caravan_proto.messages.limits import Limits
from caravan_proto.messages.media import EncodedMedia, PromptPart, TokenizedParts
from caravan_proto.messages.model import Info, ModelFile, Numerics, ShardClaim, ShardStatus, TokenizedText
from caravan_proto.messages.results import LayoutSet, Loaded, Saved
from caravan_scheduler.actions import Fetch
from caravan_scheduler.core.engine import ModelFacts
from caravan_scheduler.core.media import Media
from caravan_scheduler.events import SavedRun, ShardLimits, Stepped


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
        max_adapters=limits.max_adapters,
        generates=limits.max_sequences > 0,
    )


Reply = Stepped | Saved | Loaded | LayoutSet


class ShardRpcError(Exception):
    """A call failed: the shard refused it (``error`` is set), or the transport did not carry it."""

    def __init__(self, error: ShardError | None, message: str) -> None:
        super().__init__(message)
        self.error = error


class TextCount:
    """How many texts calls under way have."""

    def __init__(self) -> None:
        self.texts = 0

    @contextmanager
    def during(self, texts: int) -> Iterator[None]:
        """Count ``texts`` while a call has them."""
        self.texts += texts
        try:
            yield
        finally:
            self.texts -= texts


class ShardCalls(Protocol):
    """A shard that can be called. `ShardClient` calls it over gRPC."""

    @property
    def embedding(self) -> TextCount:
        """The texts that are being embedded."""
        ...

    @property
    def tokenizing(self) -> TextCount:
        """The texts that are being tokenized."""
        ...

    async def close(self) -> None:
        """End every call, with ShardRpcError."""
        ...

    async def info(self) -> ShardInfo:
        """Return identity and limits."""
        ...

    async def lease(
        self, router_id: str, epoch: int, ttl_s: float, claim: ShardClaim | None = None, url: str = ""
    ) -> None:
        """Take the shard with a new epoch, or keep it with the same one.

        With a ``claim``, do not take it from another router, which learns of it. ``url``: where other routers reach
        this one, to hand requests over to it; empty if they cannot.
        """
        ...

    async def give_back(self, router_id: str, epoch: int) -> None:
        """End the lease; a shard that drains ends."""
        ...

    async def drain(self, epoch: int) -> None:
        """Let the shard drain, and end when its lease is given back."""
        ...

    async def fetch_runs(
        self, fetch: Fetch, epoch: int, source_epoch: int, source_hostname: str = ""
    ) -> tuple[bool, ...]:
        """Let the shard copy runs of another shard, whose certificate has ``source_hostname``, by default its host.

        Return for each run whether it is there now.
        """
        ...

    async def saved_runs(self) -> tuple[SavedRun, ...]:
        """Return the runs that the shard has saved."""
        ...

    async def load_adapter(self, source: AdapterSource, epoch: int) -> LoadedAdapter:
        """Let the shard load an adapter, until it is unloaded or the lease ends."""
        ...

    async def unload_adapter(self, key: str, epoch: int) -> None:
        """Let the shard free an adapter; refused with ADAPTER_IN_USE while a sequence with it has not ended."""
        ...

    def watch(self, interval_s: float, silence_s: float, epoch: int = 0) -> AsyncGenerator[ShardStatus, None]:
        """Yield the shard's status when it starts to drain and at least every ``interval_s``; end when it ends.

        ``epoch``: of the lease that soon ends when this stream breaks off; 0 for none.

        Raises ShardRpcError after ``silence_s`` without a status.
        """
        ...

    async def start(self, command: Command, epoch: int) -> AsyncIterator[Sequence[Reply]]:
        """Send ``command`` and return its replies, one for each step, or one; those of a message together.

        What is started later runs later.
        """
        ...

    async def tokenize(self, text: str, *, add_special: bool, parse_special: bool = True) -> TokenizedText:
        """Return the tokens of ``text``; with ``parse_special``, the text of a control token becomes that token."""
        ...

    async def tokenize_texts(
        self, texts: Sequence[str], *, add_special: bool = True, parse_special: bool = True
    ) -> list[tuple[int, ...]]:
        """Return the token ids of each text as `tokenize` does."""
        ...

    async def tokenize_pairs(self, pairs: Sequence[tuple[str, str]]) -> list[tuple[int, ...]]:
        """Return the token ids of each pair of a query and a document as a model that ranks reads it."""
        ...

    async def detokenize(self, token_ids: Sequence[int]) -> TokenizedText:
        """Return the pieces of ``token_ids``."""
        ...

    async def tokenize_parts(self, parts: Sequence[PromptPart]) -> TokenizedParts:
        """Return the cells of a prompt of texts and media."""
        ...

    async def encode_media(self, media: Media) -> EncodedMedia:
        """Encode a medium, unless the shard has its embeddings."""
        ...

    async def compile_constraint(self, constraint: Constraint) -> str | None:
        """Compile ``constraint``; return what is wrong with it, or None."""
        ...

    async def embed(self, texts: Sequence[Sequence[int]]) -> list[tuple[float, ...]]:
        """Return the vector of each text, given as tokens."""
        ...
