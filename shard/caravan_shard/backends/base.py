"""What the engine needs of a model with a KV cache."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import numpy as np

from caravan_shard.arrays import Flags, Floats, Ids, State
from caravan_shard.kv_layout import KvLayout
from caravan_shard.sampling.candidates import CandidateFilter


class StartupError(Exception):
    """The backend cannot start as configured; the message says what to do."""


class DecodeOutcome(Enum):
    """How a pass ended."""

    OK = "ok"
    NO_KV = "no_kv"  # no room; memory as before
    ABORTED = "aborted"  # part of the pass may be in memory
    INVALID = "invalid"  # llama.cpp refused the batch; memory as before
    FAILED = "failed"  # part of the pass may be in memory


class PrefixSharing(Enum):
    """Which prefixes of a sequence another may start from."""

    ANY = "any"
    # Recurrent state cannot be cut back: only all of what the source holds.
    WHOLE_ONLY = "whole_only"


class Saving(Enum):
    """What of a sequence can leave the cache and come back."""

    SUFFIXES = "suffixes"  # also without its beginning, which another sequence provides when it comes back
    WHOLE_ONLY = "whole_only"
    NOTHING = "nothing"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What a router needs to know of the model file, and the names of the adapters that were loaded for it."""

    name: str
    fingerprint: str
    vocabulary_size: int
    trained_context: int
    chat_template: str
    bos_text: str
    eos_text: str
    eog_ids: frozenset[int]
    architecture: str
    adapters: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """What fits: cells and tokens are counts, not bytes.

    ``max_prompt_logprob_tokens``: of all sequences of a pass together. Outputs of a pass beyond one per sequence.
    ``embedding_size``: numbers of a vector; 0 if there are none to be had. ``max_embed_tokens``: of one text.
    """

    cells: int
    cells_per_sequence: int
    max_sequences: int
    max_batch_tokens: int
    layout: KvLayout
    sharing: PrefixSharing
    saving: Saving
    max_prompt_logprob_tokens: int
    embedding_size: int = 0
    max_embed_tokens: int = 0


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """The tokens of one pass: four arrays of equal length, rows of a sequence together, sequences ascending.

    ``outputs`` is 1 where logits are needed. ``adapter`` applies to all of them; empty for none.
    """

    tokens: Ids
    positions: Ids
    sequence_ids: Ids
    outputs: Flags
    adapter: str = ""

    @property
    def output_count(self) -> int:
        """Rows of logits that the pass makes."""
        return int(np.count_nonzero(self.outputs))


@dataclass(frozen=True, slots=True)
class Piece:
    """The raw bytes of a token; ``special`` ones are not part of the text."""

    data: bytes
    special: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefix:
    """Tokens [0, length) of a sequence."""

    source_id: int
    length: int


class Vocabulary(Protocol):
    """Text and tokens. Any thread may call these at any time."""

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        """The token ids of ``text``."""
        ...

    def piece(self, token: int) -> Piece:
        """The piece of a token below the vocabulary's size; cached."""
        ...

    def pieces(self) -> list[Piece]:
        """Those of all tokens; not cached."""
        ...


class Backend(Protocol):
    """A model with a KV cache. One thread calls it: the one that made it."""

    @property
    def facts(self) -> ModelFacts: ...

    @property
    def capacity(self) -> Capacity: ...

    @property
    def vocabulary(self) -> Vocabulary: ...

    @property
    def candidate_filter(self) -> CandidateFilter: ...

    def decode(self, batch: TokenBatch) -> DecodeOutcome:
        """One forward pass; returns when the logits are there."""
        ...

    def logits(self, rows: int) -> Floats:
        """[rows, vocabulary]: one row per output of the last pass, in batch order; valid until the next pass."""
        ...

    def length(self, sequence_id: int) -> int:
        """Tokens the cache holds of the sequence."""
        ...

    def trim(self, sequence_id: int, length: int) -> bool:
        """Keep the first ``length`` tokens; 0 forgets the sequence and always works. False: nothing was done."""
        ...

    def copy(self, source_id: int, destination_id: int, length: int) -> None:
        """Let ``destination_id``, which holds nothing, start with the first ``length`` tokens of ``source_id``."""
        ...

    def save(self, sequence_id: int, start: int, most_bytes: int) -> State | None:
        """What `restore` needs of the tokens from ``start`` on; those before are forgotten.

        None if it has more than ``most_bytes`` or cannot be had.
        """
        ...

    def restore(self, sequence_id: int, state: State, prefix: Prefix | None) -> bool:
        """Put back what `save` took out, under an id that holds nothing; ``prefix`` if its start was not 0.

        False: there was no room or the state is damaged; the id holds nothing.
        """
        ...

    def embed(self, tokens: Sequence[int]) -> Floats | None:
        """[embedding_size], of length 1 (Euclidean); None if the pass failed. Where that size is not 0."""
        ...

    def close(self) -> None:
        """Free everything."""
        ...
