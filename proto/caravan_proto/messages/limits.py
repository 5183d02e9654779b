"""What fits on a shard."""

from dataclasses import dataclass
from enum import Enum


class KvLayout(Enum):
    """How the cells of the KV cache are given to sequences: the two layouts of llama.cpp's cache.

    UNIFIED: all sequences take cells from one pool. A copied prefix shares the cells of its source. Attention looks at
    every used cell, whichever sequence holds it.
    SPLIT: each sequence has cells / sequences cells of its own. A copied prefix is a copy.
    """

    UNIFIED = "unified"
    SPLIT = "split"


class Saving(Enum):
    """Which cells of a sequence can be saved and restored."""

    # Any run of them, which can be cut anywhere.
    ANY = "any"
    # The same. But a sequence continues only where its recurrent state was saved too, as a run without cells.
    WITH_STATE = "with_state"
    NOTHING = "nothing"


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutLimits:
    """What depends on the layout of a shard's KV cache.

    ``whole_only``: a sequence can only be copied as it is, never cut back (recurrent memory), but for the last
    ``rollback_tokens`` of a step that has computed more of it, right after that step.
    """

    layout: KvLayout = KvLayout.UNIFIED
    cells: int
    cells_per_sequence: int
    whole_only: bool = False
    rollback_tokens: int = 0
    saving: Saving = Saving.NOTHING

    @property
    def can_have_drafts(self) -> bool:
        """Whether a sequence can be cut back to the draft tokens of a step that are right."""
        return not self.whole_only or self.rollback_tokens > 0

    @property
    def shares_cells(self) -> bool:
        """Whether sequences with a common prefix hold its cells once, and any sequence may use any cell.

        Otherwise each sequence has its own part of the cells, and copies of prefixes.
        """
        return self.layout is KvLayout.UNIFIED


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedBytes:
    """Bytes of saved runs in host memory and on disk."""

    memory: int
    disk: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What fits: sequences, tokens in one step, texts, and what the layouts of the cache hold.

    ``layouts``: those that the cache can have; the first is the current one. ``max_sequences`` is 0 if the model only
    embeds. ``max_top_n_tokens``: most alternatives for a token. ``max_tokenize_bytes``: the longest text to tokenize.
    ``max_prompt_logprob_tokens``: prompt tokens of one step whose logprobs are returned, all sequences together.
    ``max_draft_tokens``: draft tokens of one step, all sequences together; 0 where sequences cannot be cut back.
    ``embedding_size``: the length of a vector, 0 if none are served. ``max_embed_tokens``: the longest text to embed.
    ``embed_tokens_at_once``: tokens of all texts that are embedded at the same time, while nothing generates.
    ``ranks``: pairs of a query and a document get a relevance instead of a vector. ``saved_capacity``: room for saved
    runs. ``run_fingerprint``: shards that have the same can fetch saved runs from each other; empty if none can,
    and until the shard knows what is in its files. ``max_adapters``: most that a router may have loaded at a time.
    """

    layouts: tuple[LayoutLimits, ...]
    max_sequences: int
    max_batch_tokens: int
    max_top_n_tokens: int
    max_tokenize_bytes: int
    max_prompt_logprob_tokens: int
    max_draft_tokens: int = 0
    embedding_size: int = 0
    max_embed_tokens: int = 0
    embed_tokens_at_once: int = 0
    max_adapters: int = 0
    ranks: bool = False
    saved_capacity: SavedBytes = SavedBytes(memory=0, disk=0)
    run_fingerprint: str = ""
