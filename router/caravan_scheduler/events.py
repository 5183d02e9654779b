"""What happens to the scheduler: a closed union of events."""

from dataclasses import dataclass
from enum import Enum

from caravan_proto.messages.commands import RunNote
from caravan_proto.messages.limits import LayoutLimits
from caravan_proto.messages.results import DraftCount, LayoutSet, Loaded, Saved, StepOutcome
from caravan_scheduler.core.tokens import Alternative, GeneratedToken, PromptToken
from caravan_scheduler.lifetimes import Lifetime
from caravan_scheduler.pins import Pin
from caravan_scheduler.sequence import Request, Sequence

_NO_NOTE = RunNote()


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardLimits:
    """What fits on a shard: sequences, tokens in one step, and what its layouts of the cache hold.

    ``layout`` is the current one, ``other_layout`` the one that the cache can change to, if any.
    ``memory_bytes`` and ``disk_bytes`` are there for saved runs.
    ``max_prompt_logprob_tokens``: prompt tokens of one step whose logprobs are returned, all sequences together.
    ``max_draft_tokens``: draft tokens of one step, all sequences together; 0 where sequences cannot be cut back.
    ``run_fingerprint``: shards that have the same can fetch saved runs from each other; empty if none can.
    ``end_tokens``: tokens that end an output, and a message within a prompt. ``encoder``: fingerprint of the projector
    that encodes media; empty without one.
    """

    layout: LayoutLimits
    other_layout: LayoutLimits | None = None
    max_sequences: int
    max_batch_tokens: int
    memory_bytes: int = 0
    disk_bytes: int = 0
    max_prompt_logprob_tokens: int = 1
    max_draft_tokens: int = 0
    run_fingerprint: str = ""
    end_tokens: frozenset[int] = frozenset()
    encoder: bytes = b""

    @property
    def draft_tokens(self) -> int:
        """Most draft tokens of one step in the current layout."""
        return self.max_draft_tokens if self.layout.can_have_drafts else 0

    @property
    def most_cells_per_sequence(self) -> int:
        """Most cells of a sequence in the layout that allows more."""
        other = self.other_layout.cells_per_sequence if self.other_layout is not None else 0
        return max(self.layout.cells_per_sequence, other)


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedRun:
    """The cells [start, end) of a prefix that a shard keeps outside its cache.

    ``cuts``: the positions where the run can be cut, each with the key of the prefix that ends there. The last one is
    its end and names the run. ``is_dropped``: it is kept only for the runs that begin inside it. ``lifetime``: how long
    it stays; None if nobody asked for that, or on a shard that has just joined.
    """

    start: int
    cuts: tuple[tuple[int, bytes], ...]
    size_bytes: int
    on_disk: bool = False
    note: RunNote = _NO_NOTE
    is_dropped: bool = False
    lifetime: Lifetime | None = None

    @property
    def key(self) -> bytes:
        return self.cuts[-1][1]


@dataclass(frozen=True, slots=True)
class Submitted:
    """A new request waits for a shard."""

    request: Request


@dataclass(frozen=True, slots=True)
class Cancelled:
    """Nobody waits for this request any more. Ignored if it has ended, since cancelling races with ending."""

    request_id: int


@dataclass(frozen=True, slots=True)
class ToolsCalled:
    """The answer to a request that has ended calls tools, so that their results are expected."""

    request_id: int


@dataclass(frozen=True, slots=True)
class ThoughtEndRequested:
    """A client wants the thought of this request to end with the tokens that it has. Ignored if it cannot be ended."""

    request_id: int


@dataclass(frozen=True, slots=True)
class Replaced:
    """Another scheduler has the requests from now on. No shard is left, and none joins. `Left` answers."""


@dataclass(frozen=True, slots=True)
class Taken:
    """Requests that have `Left` another scheduler wait here, with the tokens that they have. Their ids are new here."""

    sequences: tuple[Sequence, ...]


@dataclass(frozen=True, slots=True)
class ShardJoined:
    """A shard was leased. It holds no sequence, but maybe ``runs`` that were saved before, in order.

    ``survived``: it is the process that was lost before, and has gone on since: it was slow or cut off, not broken.
    """

    shard: str
    limits: ShardLimits
    runs: tuple[SavedRun, ...] = ()
    survived: bool = False


@dataclass(frozen=True, slots=True)
class RunsFound:
    """A shard knows now what is in its files, and has found ``runs`` that were saved before, in order.

    ``run_fingerprint``: see `ShardLimits`. Ignored if it is lost.
    """

    shard: str
    run_fingerprint: str
    runs: tuple[SavedRun, ...] = ()


@dataclass(frozen=True, slots=True)
class ShardLost:
    """A shard is gone with all it held. Ignored if it never joined."""

    shard: str


@dataclass(frozen=True, slots=True)
class ShardDraining:
    """A shard is about to end: it takes no sequences, and those that it has move to other shards or end there."""

    shard: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Stepped:
    """A step has ended: the reply to a Prefill or an Evaluate, or one of the replies to a Decode.

    ``tokens``, ``prompt_logprobs``, ``drafts`` and ``feedback`` (see `Sequence`) come with the sequence id they belong
    to, as of the command that produced them. A sequence whose drafts were accepted has several tokens.
    ``prompt_logprobs`` are those of the step's chunks. ``evaluations``: the likeliest next tokens of rows, likeliest
    first. ``without_logits``: sequences that have ended because the model computed NaN or infinite logits for them.
    ``seconds``: duration of the step on the shard, of which ``forward_s`` computing and ``sample_s`` choosing
    tokens. ``missing_media``: the ids of media that the shard has not encoded, if that is the outcome.
    """

    shard: str
    command_id: int
    outcome: StepOutcome
    tokens: tuple[tuple[int, GeneratedToken], ...]
    seconds: float
    forward_s: float = 0.0
    sample_s: float = 0.0
    prompt_logprobs: tuple[tuple[int, tuple[PromptToken, ...]], ...] = ()
    drafts: tuple[tuple[int, DraftCount], ...] = ()
    evaluations: tuple[tuple[int, tuple[Alternative, ...]], ...] = ()
    feedback: tuple[tuple[int, float], ...] = ()
    missing_media: tuple[bytes, ...] = ()
    without_logits: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetched:
    """The reply to a Fetch, with one flag for each key. None is true if the call failed."""

    transfer_id: int
    fetched: tuple[bool, ...]
    seconds: float


class EncodeOutcome(Enum):
    """What became of an `Encode`."""

    # The shard has the medium's embeddings.
    DONE = "done"
    # The call failed, and may succeed another time.
    FAILED = "failed"
    # The shard does not encode this medium.
    REFUSED = "refused"


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoded:
    """The reply to an Encode. ``seconds``: 0 if the shard had the embeddings before."""

    encode_id: int
    outcome: EncodeOutcome
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class CommandEnded:
    """No more replies will come for this command."""

    shard: str
    command_id: int


@dataclass(frozen=True, slots=True)
class FlushRequested:
    """An operator wants ``shards`` to give up what they keep of ended sequences. `Flushed` of the same id answers.

    ``key``: that of the prefix to give up, which is then no longer pinned; None for all. Pins of all stay.
    """

    flush_id: int
    shards: frozenset[str]
    key: bytes | None = None


@dataclass(frozen=True, slots=True)
class PinRequested:
    """An operator wants a prefix to stay. `PinAnswered` of the same id answers."""

    pin_id: int
    pin: Pin


@dataclass(frozen=True, slots=True)
class Unpinned:
    """The prefix that ``key`` names need not stay any more. Ignored if it is not pinned."""

    key: bytes


@dataclass(frozen=True, slots=True)
class GraceChanged:
    """From now on, requests wait for ``seconds`` while no shard is up; 0 ends those that wait."""

    seconds: float


@dataclass(frozen=True, slots=True)
class ActionFailed:
    """A bug kept the shell from carrying out an action that concerns a shard, so that nobody knows what shards do."""


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


Event = (
    Submitted
    | Cancelled
    | ThoughtEndRequested
    | ToolsCalled
    | Replaced
    | Taken
    | ShardJoined
    | RunsFound
    | ShardLost
    | ShardDraining
    | Stepped
    | Saved
    | Loaded
    | LayoutSet
    | Fetched
    | Encoded
    | CommandEnded
    | FlushRequested
    | PinRequested
    | Unpinned
    | GraceChanged
    | ActionFailed
    | Tick
)
