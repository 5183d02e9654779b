"""The results of commands."""

from dataclasses import dataclass, field
from typing import NamedTuple

from caravan_proto.errors import ShardError
from caravan_proto.messages.adapters import LoadedAdapter
from caravan_proto.messages.results import DraftSource, FinishReason, Holdings, LayoutSet, Loaded, Saved, StepOutcome
from caravan_shard.arrays import Floats
from caravan_shard.backends.base import Vocabulary
from caravan_shard.sampling.logprobs import TokenLogprobs


@dataclass(frozen=True, slots=True)
class Refusal:
    """A command was refused and changed nothing."""

    error: ShardError
    sentence: str


def bad_request(sentence: str) -> Refusal:
    """Refuse a command that is wrong whatever the shard holds."""
    return Refusal(ShardError.BAD_REQUEST, sentence)


@dataclass(slots=True)
class LogprobColumns:
    """Log probabilities of tokens, as columns: ``logprobs`` and ``top_counts`` have an entry for each token.

    The ``top_`` lists have the alternatives of the first token, then those of the second, and so on.
    """

    logprobs: list[float] = field(default_factory=list)
    top_counts: list[int] = field(default_factory=list)
    top_token_ids: list[int] = field(default_factory=list)
    top_logprobs: list[float] = field(default_factory=list)
    top_pieces: list[bytes] = field(default_factory=list)
    top_specials: list[bool] = field(default_factory=list)

    def add(self, found: TokenLogprobs) -> None:
        """Add an entry. The pieces of its alternatives follow by `add_pieces`."""
        self.logprobs.append(found.chosen)
        self.top_counts.append(len(found.top_ids))
        self.top_token_ids.extend(found.top_ids)
        self.top_logprobs.extend(found.top)

    def add_pieces(self, vocabulary: Vocabulary) -> None:
        """Add the pieces of the alternatives that have none yet."""
        for top_id in self.top_token_ids[len(self.top_pieces) :]:
            piece = vocabulary.piece(top_id)
            self.top_pieces.append(piece.data)
            self.top_specials.append(piece.special)


@dataclass(slots=True)
class TokenRows(LogprobColumns):
    """The sampled tokens of a step, as columns: the n-th entries of all lists belong to one token.

    A sequence whose drafts were accepted has several, in their order.

    ``logprobs`` (NaN where not requested) and ``top_counts`` are empty if no sequence requested them. ``feedback``:
    what the token's sequence carries to its next one, NaN for nothing; empty if no sequence carries anything.

    ``without_logits``: sequences that have got no token, and have ended, as their logits are NaN or infinite.
    """

    sequence_ids: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    pieces: list[bytes] = field(default_factory=list)
    specials: list[bool] = field(default_factory=list)
    finish_reasons: list[FinishReason | None] = field(default_factory=list)
    feedback: list[float] = field(default_factory=list)
    without_logits: list[int] = field(default_factory=list)

    @property
    def ends_a_sequence(self) -> bool:
        """Whether a sequence has ended."""
        return bool(self.without_logits) or any(reason is not None for reason in self.finish_reasons)


@dataclass(slots=True)
class DraftRows:
    """The drafts of a step, as columns: of each sequence that had any, how many tokens, and how many were accepted."""

    sequence_ids: list[int] = field(default_factory=list)
    sources: list[DraftSource] = field(default_factory=list)
    drafted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)


@dataclass(slots=True)
class KnownLogprobs(LogprobColumns):
    """Log probabilities of tokens that are known: ``counts`` entries of each sequence, in order."""

    sequence_ids: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)


@dataclass(slots=True)
class PromptLogprobs(KnownLogprobs):
    """An entry for each token of a chunk of a prompt.

    The first token of a prompt, and the first one behind a copy, has NaN and no alternatives: the logits before it were
    not computed. ``without_logits``: sequences of which logits that were computed are NaN or infinite.
    """

    without_logits: list[int] = field(default_factory=list)


@dataclass(slots=True)
class Evaluations(KnownLogprobs):
    """An entry for each output of a row: the log probability of the next token of the row, NaN after the last one.

    ``score_logprobs`` has the log probabilities of the row's `score_ids` after each output.
    """

    score_logprobs: list[float] = field(default_factory=list)


class StepTimings(NamedTuple):
    """Nanoseconds of one step; ``total_ns`` starts when the command was taken or the previous step ended."""

    forward_ns: int
    sample_ns: int
    total_ns: int


class StepResult(NamedTuple):
    """One step; ``prompt_logprobs`` if a sequence of the step requested them, ``evaluations`` if it had rows.

    A named tuple, since one is made for each step and a frozen dataclass takes three times as long.

    ``drafts`` if a sequence had a draft. ``missing_media``: ids of the media that were not here.
    """

    outcome: StepOutcome
    rows: TokenRows
    timings: StepTimings
    prompt_logprobs: PromptLogprobs | None = None
    evaluations: Evaluations | None = None
    drafts: DraftRows | None = None
    missing_media: tuple[bytes, ...] = ()

    @property
    def most_tokens(self) -> int:
        """The most tokens that a sequence got; at least 1."""
        return 1 if self.drafts is None else 1 + max(self.drafts.accepted)


@dataclass(frozen=True, slots=True)
class Embedded:
    """What `Backend.embed` returned."""

    values: Floats


@dataclass(frozen=True, slots=True)
class Adopted:
    """Whether the run is here now: there may be no room for it."""

    kept: bool


@dataclass(frozen=True, slots=True)
class AdapterUnloaded:
    """An adapter is not loaded any more."""


Result = (
    StepResult | Holdings | Saved | Loaded | LayoutSet | Embedded | Adopted | LoadedAdapter | AdapterUnloaded | Refusal
)
