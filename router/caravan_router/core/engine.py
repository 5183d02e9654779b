"""The models and their engines as the HTTP layer sees them."""

from collections.abc import AsyncIterator, Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from caravan_router.core.constraint import Constraint
from caravan_router.core.generation import GenerationSpec, GenerationState
from caravan_router.core.prefixes import ShardPrefixes
from caravan_router.core.shards import ShardReport
from caravan_router.core.speculation import DraftCount
from caravan_router.core.tokens import GeneratedToken, PromptToken
from caravan_router.core.trace import NO_TRACE, GenerationTrace


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
    def prompt_logprobs(self) -> Sequence[PromptToken]:
        """One entry for each token of the prompt if the spec asks for them, else empty. Complete at the first token."""
        ...

    @property
    def drafts(self) -> Sequence[DraftCount]:
        """The draft tokens so far, of each source that had any."""
        ...

    def __aiter__(self) -> AsyncIterator[Sequence[GeneratedToken]]: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class TokenizedText:
    """A text in columns: for each token its id, its raw bytes, and whether it is a control token."""

    token_ids: tuple[int, ...]
    pieces: tuple[bytes, ...]
    specials: tuple[bool, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class FillTokens:
    """Control tokens for filling in the middle of a text.

    ``begin`` stands before a prompt, ``repository`` before the name of a repository, ``file`` before the name of each
    of its files. None: the vocabulary has none, or for ``begin`` the model wants none.
    """

    prefix: int
    suffix: int
    middle: int
    begin: int | None = None
    repository: int | None = None
    file: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """A model that shards serve, with the smallest of their limits.

    ``tool_template``: template for prompts with tools, if the model has one beside ``chat_template``. ``adapters``:
    those that all shards have. ``total_cells``: cells of all shards together. ``embedding_size``: 0 if no vectors are
    served. ``ranks``: texts are pairs of a query and a document, and get a relevance from 0 to 1 instead of a vector.
    ``eos_token_ids``: tokens that end an output. ``fill``: None if the vocabulary has no tokens for filling in.

    The rest describes the file for people and tools. ``weight_bytes`` is the size of all weights, ``device_bytes`` of
    those in the memory of a shard's accelerators. ``modified_s``: when the file was last changed, in seconds since
    1970. ``metadata`` has GGUF keys. A value that is unknown is its default.
    """

    name: str
    fingerprint: str
    vocabulary_size: int
    chat_template: str
    bos_text: str
    eos_text: str
    max_sequence_tokens: int
    max_top_n_tokens: int
    max_tokenize_bytes: int
    total_cells: int
    tool_template: str = ""
    adapters: tuple[str, ...] = ()
    draft_model: str = ""
    eos_token_ids: frozenset[int] = frozenset()
    embedding_size: int = 0
    max_embed_tokens: int = 0
    ranks: bool = False
    fill: FillTokens | None = None
    architecture: str = ""
    parameter_count: int = 0
    weight_bytes: int = 0
    quantization: str = ""
    modified_s: int = 0
    device_bytes: int | None = None
    metadata: tuple[tuple[str, str | int | bool], ...] = ()


class Queries(Protocol):
    """Questions that a model answers without generating. Every call raises NoShardError if no shard answers."""

    async def tokenize(self, text: str, *, add_special: bool = True, parse_special: bool = True) -> TokenizedText:
        """Return the tokens of ``text``; with ``parse_special``, the text of a control token becomes that token.

        Raises TextTooLongError.
        """
        ...

    async def tokenize_pair(self, query: str, document: str) -> TokenizedText:
        """Return the tokens of a pair as a model that ranks reads it. Raises TextTooLongError."""
        ...

    async def detokenize(self, token_ids: Sequence[int]) -> TokenizedText:
        """Return the pieces of ``token_ids``, which must be below the vocabulary's size."""
        ...

    async def compile_constraint(self, constraint: Constraint) -> str | None:
        """Compile ``constraint`` for the sequences to come, or return what is wrong with it."""
        ...

    async def embed(self, texts: Sequence[tuple[int, ...]]) -> list[tuple[float, ...]]:
        """Return a vector of length 1 for each text of 1 to ``max_embed_tokens`` tokens. Raises GenerationError.

        A model that ranks takes pairs and returns one number for each.
        """
        ...


class Engine(Protocol):
    """A model that generates, wherever it runs."""

    @property
    def model(self) -> ModelFacts:
        """The model. It stays known while no shard is up."""
        ...

    @property
    def healthy(self) -> bool:
        """Whether at least one shard is up and makes progress."""
        ...

    @property
    def queries(self) -> Queries: ...

    def submit(self, spec: GenerationSpec, trace: GenerationTrace = NO_TRACE) -> TokenStream:
        """Queue a generation, whose events ``trace`` gets. Never blocks and never refuses."""
        ...


class Fleet(Protocol):
    """All models, and the shards that serve them."""

    @property
    def engines(self) -> Sequence[Engine]:
        """The engine of each known model, no two of one name. The first one that is expected, or else this list's
        first, is the default.
        """
        ...

    @property
    def expected(self) -> Sequence[str]:
        """Names of models that are sure to join; the first is the default. Any other model may join, too."""
        ...

    @property
    def strict(self) -> bool:
        """Whether a model answers to its own name only: there are expected models, or several were served at a time."""
        ...

    def engine(self, name: str) -> Engine | None:
        """Return the engine of the model of this name, "" for the default; None if it is not known yet."""
        ...

    async def wait_for_model(self, name: str) -> None:
        """Wait until the model of this name is known, "" for any; at most the time that requests wait for a shard."""
        ...

    @property
    def healthy(self) -> bool:
        """Whether at least one shard of any model is up and makes progress."""
        ...

    def shards(self) -> Sequence[ShardReport]:
        """Return the state of each shard whose address is known, in the order in which the addresses became known."""
        ...

    def cached_prefixes(self) -> Sequence[ShardPrefixes]:
        """Return what each shard that is up keeps of ended sequences."""
        ...

    async def drain_shard(self, address: str) -> bool:
        """Let a shard drain and end; return whether it has agreed, which it does if it is up.

        Its sequences, and what it keeps of ended ones, move to other shards where these have room.
        """
        ...

    async def flush_prefixes(self, shards: Collection[str]) -> Sequence[ShardPrefixes]:
        """Evict all that ``shards`` keep of ended sequences, and return it. Shards that are not up are left out."""
        ...
