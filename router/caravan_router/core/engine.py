"""What the HTTP layer may ask of the engine."""

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from caravan_router.core.constraint import Constraint
from caravan_router.core.generation import GenerationSpec, GenerationState
from caravan_router.core.tokens import GeneratedToken, PromptToken


@dataclass(frozen=True, slots=True)
class StreamTimes:
    """Clock readings of a stream, seconds on ``time.monotonic``; None until it happened."""

    submitted: float
    started: float | None
    first_token: float | None


class TokenStream(Protocol):
    """The tokens of one generation, as they are sampled; ends after the token with ``finish``.

    Whoever holds it closes it, on every path; closing early releases the sequence by the next step.
    Iterating raises GenerationError or NoShardError.
    """

    @property
    def state(self) -> GenerationState: ...

    @property
    def times(self) -> StreamTimes: ...

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens it started with that had been computed before; known from the first token on."""
        ...

    @property
    def prompt_logprobs(self) -> Sequence[PromptToken]:
        """One entry for each token of the prompt if the spec asks for them, else empty. Complete at the first token."""
        ...

    def __aiter__(self) -> AsyncIterator[GeneratedToken]: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class TokenizedText:
    """Columns: the n-th id, its raw bytes, and whether it is a control token."""

    token_ids: tuple[int, ...]
    pieces: tuple[bytes, ...]
    specials: tuple[bool, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What the shards said of the model they serve, the smallest limits among them.

    ``tool_template``: for prompts with tools, where the file has one beside ``chat_template``. ``adapters``: those that
    all shards have. ``embedding_size``: 0 if vectors are not served.
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
    embedding_size: int = 0
    max_embed_tokens: int = 0


class Queries(Protocol):
    """What a model answers without generating. Every call raises NoShardError if no shard answers."""

    async def tokenize(self, text: str, *, add_special: bool = True) -> TokenizedText:
        """Return the tokens of ``text``. Raises TextTooLongError."""
        ...

    async def detokenize(self, token_ids: Sequence[int]) -> TokenizedText:
        """Return the pieces of ``token_ids``, which must be below the vocabulary's size."""
        ...

    async def compile_constraint(self, constraint: Constraint) -> str | None:
        """Compile ``constraint`` for the sequences to come, or return what is wrong with it."""
        ...

    async def embed(self, texts: Sequence[tuple[int, ...]]) -> list[tuple[float, ...]]:
        """Return a vector of length 1 for each text of 1 to ``max_embed_tokens`` tokens. Raises GenerationError."""
        ...


class Engine(Protocol):
    """A model that generates, wherever it runs."""

    @property
    def model(self) -> ModelFacts | None:
        """None until the first shard was seen; kept while none is up."""

    @property
    def healthy(self) -> bool:
        """At least one shard is up and makes progress."""

    @property
    def queries(self) -> Queries: ...

    def submit(self, spec: GenerationSpec) -> TokenStream:
        """Queue a generation. Never blocks and never refuses."""
