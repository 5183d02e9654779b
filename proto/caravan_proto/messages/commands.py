"""What a router tells a shard to do. A shard checks every number of it.

``shard`` and ``command_id`` of a command are the router's own and do not travel: where it goes, and its number.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from caravan_proto.messages.constraint import Constraint, Thought
from caravan_proto.messages.limits import KvLayout
from caravan_proto.messages.media import MediaSpan
from caravan_proto.messages.sampling import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """What a shard does before the command itself: release, then park, then drop, then spill.

    ``release``: sequence ids to free. ``park``: ids of sequences that end, each with the number of tokens to keep for
    others to start from. ``drop_runs`` and ``spill_runs``: keys of saved runs to forget, and of saved runs to move from
    memory to disk.
    """

    release: Sequence[int] = ()
    park: Sequence[tuple[int, int]] = ()
    drop_runs: Sequence[bytes] = ()
    spill_runs: Sequence[bytes] = ()


@dataclass(frozen=True, slots=True)
class PrefixCopy:
    """Start from the first ``length`` tokens of a sequence; if it has the same id, in place of it."""

    source_id: int
    length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceParameters:
    """The parameters of one sequence.

    ``prompt_length``: tokens [0, prompt_length) are the client's prompt.
    ``max_length``: the sequence ends when prompt and output together have so many tokens.
    ``ignore_eos``: end-of-generation tokens do not end the sequence. With a constraint they are not sampled either,
    unless the constraint allows nothing else.
    ``stop_token_ids``: the sequence ends when one of these is sampled, even where its constraint is not complete.
    ``min_tokens``: before so many output tokens, neither end-of-generation tokens nor ``stop_token_ids`` are sampled,
    unless the constraint allows nothing else. A constraint that is complete ends the sequence whatever ``min_tokens``
    is.
    ``adapter``: one of `ModelFile.adapters`; empty for none.
    ``prompt_logprobs``: return the log probabilities of the prompt's tokens.
    ``constraint``: the output matches it, or the answer if the output begins with a ``thought``.
    ``max_draft_tokens``: most draft tokens of the sequence in a step. ``prediction``: the output as the client
    expects it, for drafts. ``draft_pool``: sequences with an equal one may draft from each other's outputs; empty for
    none. None of these changes the output.
    ``feedback``: what the last output token so far has left to `caravan_shard.sampling.feedback`; None for nothing.
    ``traceparent``: the span of the request as W3C Trace Context writes it; empty if the request is not traced.
    """

    sampling: SamplingParams
    prompt_length: int
    max_length: int
    ignore_eos: bool = False
    stop_token_ids: frozenset[int] = frozenset()
    min_tokens: int = 0
    adapter: str = ""
    prompt_logprobs: bool = False
    constraint: Constraint | None = None
    thought: Thought | None = None
    max_draft_tokens: int = 0
    prediction: Sequence[int] = ()
    draft_pool: bytes = b""
    traceparent: str = ""
    feedback: float | None = None

    def prompt_logprob_count(self, start: int, count: int) -> int:
        """Return how many of the ``count`` tokens from ``start`` on have prompt logprobs. These are the first ones."""
        return max(0, min(count, self.prompt_length - start)) if self.prompt_logprobs else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """A run of known tokens to compute, from position ``start`` on. Under ``media``, the tokens are 0.

    ``setup`` is set on the first chunk of a sequence's stay, which may have a ``copy``, and ``last`` on the chunk after
    which a token is sampled.
    """

    sequence_id: int
    start: int
    token_ids: Sequence[int]
    last: bool
    setup: SequenceParameters | None = None
    copy: PrefixCopy | None = None
    media: Sequence[MediaSpan] = ()

    @property
    def takes_over(self) -> bool:
        """Whether the new sequence takes over what its id holds."""
        return self.copy is not None and self.copy.source_id == self.sequence_id


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefill:
    """Run one step: chunks of prompts, and one decode token for each sequence of ``ride``."""

    shard: str = ""
    command_id: int = 0
    header: Header = Header()
    chunks: Sequence[Chunk]
    ride: Sequence[int] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Decode:
    """Run up to ``max_steps`` steps, fewer if the next command comes. No sequence gets more than ``max_steps`` tokens.

    A step may verify up to ``max_draft_tokens`` draft tokens, of all sequences together. A step that ends less than
    ``reply_interval_ms`` after the last reply may be reported with the next one.
    """

    shard: str = ""
    command_id: int = 0
    header: Header = Header()
    sequence_ids: Sequence[int]
    max_steps: int
    max_draft_tokens: int = 0
    reply_interval_ms: int = 0


class RowOutputs(Enum):
    """After which tokens of a row the distribution of the next token is returned."""

    NONE = "none"
    LAST = "last"
    ALL = "all"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Known tokens to compute behind what a sequence holds, or behind a ``copy``, which makes a new and ended sequence.

    ``outputs``: None if it is one that the shard does not know. ``top_n_tokens``: how many of the likeliest next tokens
    are returned after each output, and ``score_token_ids`` those whose log probabilities are. ``keep_length``: cut the
    sequence back to this length afterwards; 0 releases it, None keeps all tokens. Under ``media``, the tokens are 0.
    """

    sequence_id: int
    start: int
    token_ids: Sequence[int]
    outputs: RowOutputs | None
    adapter: str = ""
    top_n_tokens: int = 0
    score_token_ids: Sequence[int] = ()
    keep_length: int | None = None
    copy: PrefixCopy | None = None
    media: Sequence[MediaSpan] = ()

    @property
    def end(self) -> int:
        """The position behind its last token."""
        return self.start + len(self.token_ids)

    @property
    def kept(self) -> int:
        """The length that the sequence is cut back to."""
        return self.end if self.keep_length is None else self.keep_length

    @property
    def takes_over(self) -> bool:
        """Whether the new sequence takes over what its id holds."""
        return self.copy is not None and self.copy.source_id == self.sequence_id


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluate:
    """Run one step over rows. Nothing is sampled; a sequence stays held as it is, unless its row says otherwise."""

    shard: str = ""
    command_id: int = 0
    header: Header = Header()
    rows: Sequence[Row]


@dataclass(frozen=True, slots=True, kw_only=True)
class FilterBatch:
    """Keep these sequences and release all others."""

    shard: str = ""
    command_id: int = 0
    header: Header = Header()
    keep: Sequence[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunNote:
    """What a saved run is, for those who find it again.

    ``before``: key of the prefix that ends where the run starts. ``tokens``: those of its cells; empty if they are not
    known. ``tenant``: name of the tenant whose requests may use it. ``adapter``: "" for none.
    """

    before: bytes = b""
    tokens: Sequence[int] = ()
    tenant: str = ""
    adapter: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveEntry:
    """Save the cells of a sequence from position ``start`` on, up to the last of ``cuts``: positions and their keys.

    Without cells, where the only cut is at ``start``, it saves the recurrent state after all that is computed.
    ``release``: free its id and cells afterwards, saved or not. The shard keeps ``note`` with the run as bytes, which
    it does not read.
    """

    sequence_id: int
    start: int
    cuts: tuple[tuple[int, bytes], ...]
    release: bool = False
    note: RunNote | bytes = b""

    @property
    def own_note(self) -> RunNote:
        """The note of an entry that the router has made."""
        assert isinstance(self.note, RunNote)
        return self.note

    @property
    def kept_note(self) -> bytes:
        """The note of an entry that a shard has got."""
        assert isinstance(self.note, bytes)
        return self.note

    @property
    def end(self) -> int:
        """The position behind its last cell."""
        return self.cuts[-1][0]

    @property
    def is_state(self) -> bool:
        """Whether it saves no cells, but the recurrent state."""
        return self.start == self.end


@dataclass(frozen=True, slots=True, kw_only=True)
class Save:
    """Copy cells of sequences out of the cache where that is possible, as runs that outlive them."""

    shard: str = ""
    command_id: int = 0
    header: Header = Header()
    entries: Sequence[SaveEntry]


@dataclass(frozen=True, slots=True)
class RunSlice:
    """The cells [start, end) of the saved run with this key; without cells, the recurrent state there."""

    key: bytes
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadEntry:
    """Make an ended sequence that holds ``token_ids``, whose cells the slices provide without gaps.

    Where there is recurrent state, the last slice is that at the end.

    ``copy``: it holds these tokens before them, in the same cells as the other sequence. Under ``media``, the tokens
    are 0.
    """

    sequence_id: int
    token_ids: Sequence[int]
    slices: Sequence[RunSlice]
    adapter: str = ""
    copy: PrefixCopy | None = None
    media: Sequence[MediaSpan] = ()

    @property
    def start(self) -> int:
        """The position of the first of ``token_ids``."""
        return 0 if self.copy is None else self.copy.length

    @property
    def end(self) -> int:
        """The position behind its last token."""
        return self.start + len(self.token_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Copy saved runs into the cache where that is possible, for sequences to start from. The runs stay."""

    shard: str = ""
    command_id: int = 0
    header: Header = Header()
    entries: Sequence[LoadEntry]


@dataclass(frozen=True, slots=True, kw_only=True)
class SetLayout:
    """Make the KV cache anew in another layout, with all sequences in it; None for one that the shard does not know."""

    shard: str = ""
    command_id: int = 0
    header: Header = Header()
    layout: KvLayout | None


Command = Prefill | Decode | Evaluate | FilterBatch | Save | Load | SetLayout
