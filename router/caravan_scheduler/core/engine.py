"""The models and their engines as the API sees them."""

from collections.abc import AsyncGenerator, AsyncIterator, Collection, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Protocol

from caravan_proto.messages.adapters import AdapterSource
from caravan_proto.messages.constraint import Constraint
from caravan_proto.messages.model import ModelFile, TokenizedText
from caravan_proto.messages.results import DraftCount
from caravan_scheduler.core.generation import ANYONE, GenerationSpec, GenerationState, Tenant
from caravan_scheduler.core.media import MediaPrompt
from caravan_scheduler.core.prefixes import PinRefusal, PrefixReport, ShardPrefixes
from caravan_scheduler.core.prompt_media import MediaTokens
from caravan_scheduler.core.recomputed import Recomputed
from caravan_scheduler.core.shards import ShardReport
from caravan_scheduler.core.tokens import GeneratedToken, PromptToken
from caravan_scheduler.core.trace import NO_TRACE, GenerationTrace


@dataclass(slots=True)
class ModelNames:
    """``expected``: of models that are sure to join; the first is the default. Any other model may join, too.

    ``aliases``: other names that models answer to, each with the name that it means. ``strict``: a model answers to its
    own names only, since there are expected models, or several were served at a time. ``load_on_demand``: a request may
    have its model loaded, so that all may be without a shard. ``unloaded``: adapters that were served. No model answers
    to their names.
    """

    expected: tuple[str, ...] = ()
    aliases: Mapping[str, str] = field(default_factory=dict)
    strict: bool = False
    load_on_demand: bool = False
    unloaded: set[str] = field(default_factory=set)

    def meant(self, name: str) -> str:
        """Return the name of the model that ``name`` means, itself if it is no alias."""
        return self.aliases.get(name, name)


@dataclass(frozen=True, slots=True, kw_only=True)
class TextSender:
    """Whose texts are embedded or tokenized, and how urgently: higher priorities go first."""

    tenant: Tenant = ANYONE
    priority: int = 0


ANY_SENDER = TextSender()
# Whose request tokenizes texts. Set once for each request, since a prompt is tokenized in a dozen places.
TEXT_SENDER: ContextVar[TextSender] = ContextVar("text_sender", default=ANY_SENDER)


@dataclass(frozen=True, slots=True)
class StreamTimes:
    """When a stream was submitted, started and had its first token, in seconds on ``time.monotonic``."""

    submitted: float
    started: float | None
    first_token: float | None


class TokenStream(Protocol):
    """The tokens of one generation as they are sampled, in lists of those that are ready together; ends after the token
    with ``finish``.

    Its holder closes it on every path; closing early releases the sequence by the next step. Iterating raises
    NoShardError, GenerationError, QueueTimeoutError or DeadlineError.
    """

    @property
    def state(self) -> GenerationState: ...

    @property
    def times(self) -> StreamTimes: ...

    @property
    def cached_tokens(self) -> int:
        """Number of prompt tokens that did not need to be computed. Known at the first token."""
        ...

    @property
    def recomputed(self) -> Recomputed | None:
        """Why prompt tokens did not come from the cache; None until the request has started."""
        ...

    @property
    def prompt_computed(self) -> int:
        """Number of prompt tokens that are computed so far, or did not need to be. 0 while the request waits."""
        ...

    @property
    def prompt_logprobs(self) -> Sequence[PromptToken]:
        """One entry for each token of the prompt if the spec asks for them, else empty. Complete at the first token."""
        ...

    @property
    def drafts(self) -> Sequence[DraftCount]:
        """The draft tokens so far, of each source that had any."""
        ...

    @property
    def feedback(self) -> float | None:
        """What mirostat or adaptive-p carries from the last token that was sampled to the next; None without them."""
        ...

    def __aiter__(self) -> AsyncIterator[Sequence[GeneratedToken]]: ...

    def end_thought(self) -> None:
        """Let the thought of a spec whose `Thought` has an ``ending`` end with the tokens that it has."""
        ...

    def call_tools(self) -> None:
        """Say that the tokens call tools, whose results are expected in another prompt."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts(ModelFile):
    """A model that shards serve, with the smallest of their limits.

    ``adapters``: those that all shards have, with those of ``loaded_adapters``: the keys, by name, of those that were
    loaded while shards ran. A shard may have ``max_adapters`` of those in memory, and has ``held_adapters``, with those
    that are freed once their requests have ended. ``total_cells``: cells of all shards together. ``embedding_size``: 0
    if no vectors are served. ``ranks``: texts are pairs of a query and a document, and get a relevance from 0 to 1
    instead of a vector. ``generates`` is false for a model that can do nothing but that: no generation may be
    submitted.
    """

    max_sequence_tokens: int
    max_top_n_tokens: int
    max_tokenize_bytes: int
    total_cells: int
    embedding_size: int = 0
    max_embed_tokens: int = 0
    ranks: bool = False
    generates: bool = True
    loaded_adapters: Mapping[str, str] = field(default_factory=dict)
    max_adapters: int = 0
    held_adapters: int = 0

    def adapter_key(self, name: str) -> str:
        """Return what tells cells of an adapter apart, which may be "" for none: see `adapters.adapter_key`."""
        return self.loaded_adapters.get(name, name)


class TextQueries(Protocol):
    """Questions about texts, which need the vocabulary only. Every call raises NoShardError if no shard answers."""

    async def tokenize(self, text: str, *, add_special: bool = True, parse_special: bool = True) -> TokenizedText:
        """Return the tokens of ``text``; with ``parse_special``, the text of a control token becomes that token.

        Raises TextTooLongError.
        """
        ...

    async def tokenize_parts(
        self, parts: MediaPrompt, *, add_special: bool = True, parse_special: bool = True
    ) -> MediaTokens:
        """Return the tokens of a prompt of texts and media, for a model that has `ModelFacts.media`.

        Adjacent texts are tokenized separately. Raises TextTooLongError, TooMuchMediaError, GenerationError.
        """
        ...

    async def detokenize(self, token_ids: Sequence[int]) -> TokenizedText:
        """Return the pieces of ``token_ids``, which must be below the vocabulary's size."""
        ...


class Queries(TextQueries, Protocol):
    """Questions that a model answers without generating. Every call raises NoShardError if no shard answers."""

    async def tokenize_texts(
        self, texts: Sequence[str], *, add_special: bool = True, parse_special: bool = True
    ) -> list[tuple[int, ...]]:
        """Return the token ids of each text as `tokenize` does. Raises TextTooLongError."""
        ...

    async def tokenize_pairs(self, pairs: Sequence[tuple[str, str]]) -> list[tuple[int, ...]]:
        """Return the token ids of each pair of a query and a document as a model that ranks reads it.

        Raises TextTooLongError.
        """
        ...

    async def compile_constraint(self, constraint: Constraint) -> str | None:
        """Compile ``constraint`` for the sequences to come, or return what is wrong with it."""
        ...

    async def embed(self, texts: Sequence[tuple[int, ...]], sender: TextSender = ANY_SENDER) -> list[tuple[float, ...]]:
        """Return a vector of length 1 for each text of 1 to ``max_embed_tokens`` tokens. Raises GenerationError.

        A model that ranks takes pairs and returns one number for each.
        """
        ...


class TextEngine(Protocol):
    """A model as far as its texts go."""

    @property
    def model(self) -> ModelFacts:
        """The model. It stays known while no shard is up."""
        ...

    @property
    def queries(self) -> TextQueries: ...


class Engine(TextEngine, Protocol):
    """A model, wherever it runs."""

    @property
    def healthy(self) -> bool:
        """Whether at least one shard is up and makes progress."""
        ...

    @property
    def queries(self) -> Queries: ...

    def submit(self, spec: GenerationSpec, trace: GenerationTrace = NO_TRACE) -> TokenStream:
        """Queue a generation, whose events ``trace`` gets, for a model that generates. Never blocks, never refuses."""
        ...

    async def pin_prompt(self, spec: GenerationSpec) -> PrefixReport | PinRefusal:
        """Let the prompt of ``spec`` stay: compute it where that is needed. Return it, or why not. Raises EngineError.

        ``spec`` generates one token, which is thrown away.
        """
        ...


class PrefixCache(Protocol):
    """What the shards of all models keep of ended sequences."""

    def cached_prefixes(self) -> Sequence[ShardPrefixes]:
        """Return what each shard that is up keeps of ended sequences, and its running sequences."""
        ...

    def find_prefix(self, prefix_id: str) -> PrefixReport | None:
        """Return the prefix of this id; None if no shard has it and it is not pinned."""
        ...

    async def drop_prefix(self, prefix_id: str) -> PrefixReport | None:
        """Evict the prefix of this id from all shards, and pin it no longer. Return it as it was, if it was.

        What other prefixes begin with, and what running sequences hold, is kept.
        """
        ...

    def pins(self) -> Sequence[PrefixReport]:
        """Return the pinned prefixes."""
        ...

    async def pin_prefix(self, prefix_id: str) -> PrefixReport | PinRefusal | None:
        """Let a prefix stay that a shard has. Return it, or why not; None if no shard has it and it is not pinned."""
        ...

    def unpin_prefix(self, prefix_id: str) -> PrefixReport | None:
        """Let a prefix make way for others again, and return it; None if it is not pinned."""
        ...

    async def flush_prefixes(self, shards: Collection[str]) -> Sequence[ShardPrefixes]:
        """Evict all that ``shards`` keep of ended sequences, and return it. Shards that are not up are left out."""
        ...


class Timeline(Protocol):
    """What the schedulers of all models do, for those who watch."""

    def messages(self) -> AsyncGenerator[bytes, None] | None:
        """Return messages as JSON, from now until the caller closes the generator. None if too many watch already.

        Who reads them slowly misses some, and is told how many.
        """
        ...


class Adapters(Protocol):
    """The adapters that are loaded while shards run."""

    async def load(self, model: str, source: AdapterSource, *, replaces: bool) -> str:
        """Load an adapter on every shard of a model, and on those to come. Return why not, "" if it is served now.

        ``replaces``: in place of the one that has its name, if there is one. Raises NoShardError.
        """
        ...

    def unload(self, name: str) -> bool:
        """Serve no more requests with an adapter that was loaded so; return whether there was one.

        Running and waiting requests go on. Its memory is free once they have ended.
        """
        ...


class Fleet(Protocol):
    """All models, and the shards that serve them."""

    @property
    def timeline(self) -> Timeline:
        """What the schedulers do from now on."""
        ...

    @property
    def prefix_cache(self) -> PrefixCache:
        """What the shards keep of ended sequences."""
        ...

    @property
    def adapters(self) -> Adapters: ...

    @property
    def engines(self) -> Sequence[Engine]:
        """The engine of each known model, no two of one name. The first one that is expected, or else this list's
        first, is the default.
        """
        ...

    @property
    def names(self) -> ModelNames:
        """The names that are known before a model has joined, and whether others are allowed."""
        ...

    def engine(self, name: str) -> Engine | None:
        """Return the engine of the model of this name, "" for the default; None if it is not known yet."""
        ...

    async def wait_for_model(self, name: str) -> None:
        """Wait until the model of this name is known, "" for any; at most the time that requests wait for a shard.

        Raises NoShardError if it is not known then.
        """
        ...

    @property
    def healthy(self) -> bool:
        """Whether at least one shard of any model is up and makes progress."""
        ...

    @property
    def ready(self) -> bool:
        """Whether a shard of any model was up since the start. It stays so, since requests wait for the next one."""
        ...

    @property
    def hands_over(self) -> bool:
        """Whether requests of some model may be for another router: see `neighbour`."""
        ...

    def neighbour(self, name: str) -> str | None:
        """Return the URL of the router that requests of the model of this name are for now; None if it is this one.

        "" means the default model.
        """
        ...

    def shards(self) -> Sequence[ShardReport]:
        """Return the state of each shard whose address is known, in the order in which the addresses became known."""
        ...

    async def drain_shard(self, address: str) -> bool:
        """Let a shard drain and end; return whether it has agreed, which it does if it is up.

        Its sequences, and what it keeps of ended ones, move to other shards where these have room.
        """
        ...
