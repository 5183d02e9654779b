"""What the HTTP layer may ask of the engine."""

import math
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Protocol

from caravan_router.scheduling.params import SamplingParams, StoppingParams
from caravan_router.scheduling.tenant import ANYONE, Tenant
from caravan_router.scheduling.tokens import GeneratedToken


class EngineError(Exception):
    """Base of what a caller of the engine must expect.

    EngineError
     +-- NoShardError         no shard is up: nothing could be tried (503)
     +-- GenerationError      a started generation could not go on (424)
     +-- TextTooLongError     more text than the shard tokenizes (422)
     +-- QueueTimeoutError    it waited too long for its turn (429)
     +-- DeadlineError        it did not end in the time its client gave it (504)
    """


class NoShardError(EngineError):
    """No shard is up."""


class GenerationError(EngineError):
    """A started generation could not go on."""


class TextTooLongError(EngineError):
    """More text than the shard tokenizes in one call."""


class QueueTimeoutError(EngineError):
    """It waited too long for its turn."""


class DeadlineError(EngineError):
    """It did not end in the time its client gave it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationSpec:
    """One sequence to generate: non-empty ``prompt`` of token ids; with the new tokens it fits a shard.

    Specs with the same prompt and ``namespace`` that are submitted together compute the prompt once. ``timeout_s``:
    from submission to the last token.
    """

    prompt: tuple[int, ...]
    sampling: SamplingParams
    stopping: StoppingParams
    priority: int = 0
    tenant: Tenant = ANYONE
    namespace: str = ""
    timeout_s: float = math.inf


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
    def times(self) -> StreamTimes: ...

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens it started with that had been computed before; known from the first token on."""
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
    """What the shards said of the model they serve, the smallest limits among them."""

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


class Engine(Protocol):
    """A model that generates, wherever it runs."""

    @property
    def model(self) -> ModelFacts | None:
        """None until the first shard was seen; kept while none is up."""

    @property
    def healthy(self) -> bool:
        """At least one shard is up and makes progress."""

    def submit(self, spec: GenerationSpec) -> TokenStream:
        """Queue a generation. Never blocks and never refuses."""

    async def tokenize(self, text: str, *, add_special: bool = True) -> TokenizedText:
        """Text to tokens, on a shard. Raises NoShardError, TextTooLongError."""
