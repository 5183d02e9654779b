"""The protocol of a model with a KV cache, and the types it uses."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import Enum
from typing import NamedTuple, Protocol

import numpy as np

from caravan_models.contents import Contents, SeenFiles
from caravan_proto.messages.commands import PrefixCopy
from caravan_proto.messages.limits import KvLayout, LayoutLimits
from caravan_proto.messages.model import ModelFile, Numerics
from caravan_shard.adapter_file import AdapterFile
from caravan_shard.arrays import Flags, Floats, Ids, State
from caravan_shard.media import CellSpan, MediaEncoder, MediaRows
from caravan_shard.sampling.joint_draw import JointDraw
from caravan_shard.sampling.logprobs import JointLogprobs
from caravan_shard.sampling.token_candidates import CandidateFilter
from caravan_shard.sampling.top_candidates import StepCandidates


class ModelUsers:
    """Threads that use a model: its vocabulary, its media encoder. Any thread may call it.

    A call that nobody waits for any more still has a thread that reads the model, so threads are counted, not calls.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._inside = 0
        self._are_refused = False

    @property
    def are_refused(self) -> bool:
        """Whether nobody may begin to use the model any more."""
        return self._are_refused

    @contextmanager
    def using(self) -> Iterator[bool]:
        """Yield whether the model may be used. If so, it stays until the block ends."""
        with self._changed:
            may_use = not self._are_refused
            self._inside += may_use
        try:
            yield may_use
        finally:
            if may_use:
                with self._changed:
                    self._inside -= 1
                    self._changed.notify_all()

    def refuse(self) -> None:
        """Let nobody begin to use the model from now on."""
        with self._changed:
            self._are_refused = True

    def end(self) -> None:
        """Refuse users and wait until those inside have left, without a limit. Whoever frees the model calls it first.

        One text, one medium or one reading of the vocabulary is what each of them does.
        """
        with self._changed:
            self._are_refused = True
            while self._inside:
                self._changed.wait()


class FileContents:
    """What is in the files that a backend was loaded from, once somebody has read them.

    ``files``: as they were before they were loaded; None if there are none to be read. ``sha256``: see `ModelFile`.
    ``state_fingerprint``: the hexadecimal name of everything that decides what states mean: states of an equal one can
    be restored. Both are empty as long as it is not known: nothing that was saved before may be used then.
    """

    def __init__(self, files: SeenFiles | None, state_fingerprint_of: Callable[[Contents], str]) -> None:
        """``state_fingerprint_of`` returns the fingerprint for these contents; any thread may call it."""
        self.files = files
        self.state_fingerprint_of = state_fingerprint_of
        self.sha256 = self.state_fingerprint = ""
        if files is not None and (known := files.known()) is not None:
            self.know(known)

    def know(self, contents: Contents) -> None:
        """Note what is in the files."""
        self.sha256 = contents.model
        self.state_fingerprint = self.state_fingerprint_of(contents)


class DecodeOutcome(Enum):
    """How a forward pass ended. Unless it is OK, the cache may hold a part of the batch."""

    OK = "ok"
    NO_KV = "no_kv"  # the cache has no room
    ABORTED = "aborted"
    INVALID = "invalid"  # llama.cpp refused the batch
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class JointEmbed:
    """What several texts that are embedded in one forward pass may have: most texts, and most tokens of all of them.

    ``lanes``: how many threads may embed at the same time, see `Backend.embed`. ``lane_tokens``: their longest text.
    """

    texts: int
    tokens: int
    lanes: int = 1
    lane_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """The capacity in numbers of cells, sequences and tokens. A model that only embeds has no cells and no sequences.

    ``layouts``: the layouts that the cells can have; the first is the current one.
    ``max_prompt_logprob_tokens``: prompt tokens with log probabilities in one step, all sequences together. A step may
    have this many outputs beyond one per sequence.
    ``embedding_size``: the length of an embedding; 0 if embeddings are not served. ``input_size``: the length of the
    row that the model reads in place of a token; 0 if it reads tokens only.
    ``max_embed_tokens``: the longest text to embed. ``joint_embed``: what texts may share a forward pass.
    ``ranks``: `Backend.embed` takes a query and a document, and says how relevant the document is.
    """

    layouts: tuple[LayoutLimits, ...]
    max_sequences: int
    max_batch_tokens: int
    max_prompt_logprob_tokens: int
    embedding_size: int = 0
    input_size: int = 0
    max_embed_tokens: int = 0
    joint_embed: JointEmbed = JointEmbed(texts=1, tokens=0)
    ranks: bool = False

    @property
    def generates(self) -> bool:
        """Whether there is room for sequences at all."""
        return self.max_sequences > 0

    @property
    def current(self) -> LayoutLimits:
        """The limits of the current layout."""
        return self.layouts[0]

    @property
    def max_draft_tokens(self) -> int:
        """Most draft tokens in one step. They use the outputs of prompt logprobs, which no decoding step has.

        0 where sequences cannot be cut back to what was accepted.
        """
        return self.max_prompt_logprob_tokens if self.current.can_have_drafts else 0

    def limits(self, layout: KvLayout) -> LayoutLimits | None:
        """Return the limits of a layout; None if the cells cannot have it."""
        return next((limits for limits in self.layouts if limits.layout is layout), None)

    def moved_to(self, layout: KvLayout) -> "Capacity":
        """Return the capacity with ``layout``, which must be possible, as the current one."""
        return replace(self, layouts=tuple(sorted(self.layouts, key=lambda limits: limits.layout is not layout)))


class TokenBatch(NamedTuple):
    """The tokens of one forward pass: arrays of equal length, sequences ascending, each sequence's tokens together.

    A named tuple, since one is made for each step and a frozen dataclass takes three times as long.

    ``outputs`` is 1 where logits are needed. ``adapter`` applies to all tokens; empty for none.
    ``candidates``: for each output, how many of the highest logits suffice, and 0 if all are needed; None: all of each.
    ``media``: rows that have embeddings in place of tokens, ascending; their tokens are `NO_TOKEN`. ``positions`` count
    cells: the backend knows at which positions the model sees them.
    """

    tokens: Ids
    positions: Ids
    sequence_ids: Ids
    outputs: Flags
    adapter: str = ""
    candidates: Ids | None = None
    media: Sequence[MediaRows] = ()

    @property
    def output_count(self) -> int:
        """Rows of logits that the forward pass makes."""
        return int(np.count_nonzero(self.outputs))


@dataclass(frozen=True, slots=True)
class Piece:
    """The raw bytes of a token. A ``special`` token is not part of the text."""

    data: bytes
    special: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class CellSlice:
    """The cells [start, end) out of ``state``, which `Backend.save` returned for the cells from ``first`` on."""

    state: State
    first: int
    start: int
    end: int


class Vocabulary(Protocol):
    """Turns text into tokens and back. Any thread may call it, as one of ``users``."""

    @property
    def users(self) -> ModelUsers:
        """What threads other than the model's own enter to use this or the model's media encoder."""
        ...

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        """Return the token ids of ``text``.

        ``add_special`` adds what the model puts around a prompt; ``parse_special`` reads the text of control tokens as
        those tokens.
        """
        ...

    def pair(self, query: str, document: str) -> list[int]:
        """Return the tokens of a query and a document as a model that ranks reads them."""
        ...

    def piece(self, token: int) -> Piece:
        """Return the piece of a token, which must be below the vocabulary's size; cached."""
        ...

    def pieces(self) -> list[Piece]:
        """Return the pieces of all tokens; not cached."""
        ...


class CachedModel(Protocol):
    """A model with a KV cache. Only the thread that made it may call it."""

    @property
    def facts(self) -> ModelFile: ...

    @property
    def capacity(self) -> Capacity:
        """What fits. Only `set_layout` changes it."""
        ...

    def decode(self, batch: TokenBatch) -> DecodeOutcome:
        """Run one forward pass; return when its logits are there."""
        ...

    def logits(self, rows: int) -> Floats:
        """Return [rows, vocabulary]: a row per output of the last forward pass, in batch order.

        The array is valid until the next forward pass. The last one is run again if it gave candidates only.
        """
        ...

    def trim(self, sequence_id: int, length: int) -> bool:
        """Keep the first ``length`` tokens of the sequence; False if nothing could be done.

        A length of 0 forgets the sequence and always works.
        """
        ...

    def copy(self, source_id: int, destination_id: int, length: int) -> None:
        """Let ``destination_id``, which holds nothing, start with the first ``length`` tokens of ``source_id``."""
        ...


class DraftBlock(NamedTuple):
    """How one pass drafts several tokens of a sequence: it has ``rows``, of the last token and of ``unknown`` ones.

    All have outputs, and hold no cells afterwards. Those from ``first`` on predict the tokens of the draft. Tokens
    before the last one are read by passes without outputs.
    """

    rows: int
    unknown: int
    first: int

    @property
    def most(self) -> int:
        """Most tokens of a draft."""
        return self.rows - self.first


class DraftModel(CachedModel, Protocol):
    """A model that guesses the next tokens of the sequences of another one, the main model.

    Its sequence ids are those of the main model, whose tokens below ``facts.vocabulary_size`` are the same here, and a
    sequence can be cut back to any length. It may be a head of the main model, which reads that one's hidden states.
    """

    @property
    def keeps_drafts(self) -> bool:
        """Whether what it has computed of draft tokens stays right once the main model has chosen these."""
        ...

    @property
    def block(self) -> DraftBlock | None:
        """How it drafts; None if each pass drafts a token, behind those of the draft so far."""
        ...

    def readable(self, sequence_id: int) -> range:
        """Return the positions of the tokens that it can read now, whether or not it has those before them."""
        ...


class Adapters(Protocol):
    """LoRA adapters that come and go while the model is in use. Only the model's own thread calls it."""

    def load(self, key: str, file: AdapterFile) -> str:
        """Load an adapter for batches that name ``key``. Return why it cannot be used, "" if it can."""
        ...

    def unload(self, key: str) -> None:
        """Free an adapter that `load` has loaded."""
        ...


class Backend(CachedModel, Protocol):
    """The model of a shard."""

    def clear_free_cells(self) -> None:
        """Let nothing be in free cells that might spoil other sequences, as NaN of a sequence that has ended."""
        ...

    @property
    def contents(self) -> FileContents:
        """What is known of the bytes in its files."""
        ...

    @property
    def numerics(self) -> Numerics:
        """How it computes, as found in the first layout."""
        ...

    @property
    def vocabulary(self) -> Vocabulary: ...

    @property
    def candidate_filter(self) -> CandidateFilter: ...

    @property
    def joint_draw(self) -> JointDraw:
        """What draws rows of a step together."""
        ...

    @property
    def joint_logprobs(self) -> JointLogprobs:
        """What computes log probabilities of rows of a step together."""
        ...

    @property
    def media(self) -> MediaEncoder | None:
        """What encodes pictures and sound, which is closed with the backend; None if prompts have text only."""
        ...

    @property
    def draft_model(self) -> DraftModel | None:
        """The draft model, which is closed with the backend; None without one."""
        ...

    @property
    def gives_candidates(self) -> bool:
        """Whether it is of use to say in a batch how many candidates suffice."""
        ...

    def candidates(self, rows: int) -> StepCandidates | None:
        """Return what there is instead of the logits of the last forward pass; None if these are all there."""
        ...

    def length(self, sequence_id: int) -> int:
        """Return how many tokens of the sequence the cache holds."""
        ...

    def save(self, sequence_id: int, start: int, end: int, most_bytes: int, *, releasing: bool) -> State | None:
        """Return the state of the cells [start, end) of a sequence; None if it exceeds ``most_bytes``.

        ``releasing``: the caller releases the sequence afterwards, so its cells may be changed. Where there is
        recurrent state, [end, end) is that after all of its tokens. Must not be called where nothing can be saved.
        """
        ...

    def restore(
        self,
        sequence_id: int,
        slices: Sequence[CellSlice],
        shared: PrefixCopy | None = None,
        spans: Sequence[CellSpan] = (),
    ) -> bool:
        """Put saved cells, which follow each other from position 0 on, under an id that holds nothing.

        ``spans``: the media among all cells that the sequence then has. Where there is recurrent state, the last slice
        is that after all of them.

        ``shared``: cells of another sequence that are equal to the first of these, and are used for both sequences
        where the layout lets them be; there, the slices may begin as late as where these cells end. False if there was
        no room or a state is damaged; the id holds nothing then.
        """
        ...

    def set_layout(self, layout: KvLayout) -> bool:
        """Forget every sequence and give the cells another of the possible layouts; False if they kept the old one.

        Raises RuntimeError if there are no cells any more.
        """
        ...

    def embed(self, texts: Sequence[Sequence[int]], lane: int | None = None) -> list[Floats | None]:
        """Return the embedding [embedding_size] of each text, of Euclidean length 1; None if the text has none.

        The texts, given as tokens, share a forward pass: there is one, or as many as ``capacity.joint_embed`` allows.
        The others change how a text's vector is rounded, and nothing else. A model that ranks takes pairs and returns
        [1] for each, from 0 to 1. Must not be called where ``capacity`` has neither.

        With a ``lane`` below ``capacity.joint_embed.lanes``, the pass has the threads of that lane only, and other
        threads may call this with other lanes meanwhile. Without one, no other call may run.
        """
        ...

    @property
    def adapters(self) -> Adapters:
        """Those that batches can name apart from ``facts.adapters``, which are none at first."""
        ...

    def close(self) -> None:
        """Wait for the users of the model, then free everything."""
        ...
