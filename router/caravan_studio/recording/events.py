"""Events as a recording has them: arrays with a name, of plain values. A key of a prefix is a number."""

from typing import Literal

import msgspec

from caravan_proto.messages.limits import LayoutLimits
from caravan_proto.messages.results import DraftSource, FinishReason, StepOutcome
from caravan_scheduler.events import EncodeOutcome, ShardLimits


class Beams(msgspec.Struct, frozen=True):
    """`BeamSearch`."""

    width: int
    index: int
    length_penalty: float
    early_stopping: Literal["YES", "NO", "NEVER"]
    eos: list[int]


class Media(msgspec.Struct, frozen=True, array_like=True):
    """`PromptMedia`, with numbers for the media and the encoder. ``spans``: the fields of each, in order."""

    spans: list[tuple[int, int, int, int, int, int]]
    contents: list[int]
    encoder: int
    atomic: bool


class Spec(msgspec.Struct, frozen=True, omit_defaults=True):
    """What decisions depend on of a `GenerationSpec`. ``namespace``: the number of that of its prefixes.

    ``constraint`` and ``thought``: 0 for none, else a number that stands for it. ``most_thought``: the most tokens of
    the thought, null for no limit. ``ends_thought``: whether it can be ended by force. ``continued``: the tokens that
    there were of its output.
    """

    prompt: list[int]
    namespace: int
    most: int
    tenant: str = ""
    session: str = ""
    weight: float = 1.0
    priority: int = 0
    adapter: str = ""
    least: int = 0
    ignore_eos: bool = False
    stop: list[int] = []
    logprobs: bool = False
    top_n_tokens: int = 0
    prompt_logprobs: bool = False
    timeout_s: float | None = None
    drafts: int = 0
    prediction: list[int] = []
    constraint: int = 0
    thought: int = 0
    most_thought: int | None = None
    ends_thought: bool = False
    beams: Beams | None = None
    media: Media | None = None
    continued: list[int] = []
    keep_s: float = 0.0


class _Event(msgspec.Struct, frozen=True, array_like=True, tag=str.lower):
    pass


class Submit(_Event, frozen=True):
    """`Submitted`. Times without a limit are null."""

    request: int
    arrived_s: float
    start_by_s: float | None
    end_by_s: float | None
    spec: Spec


class Cancel(_Event, frozen=True):
    request: int


class Conclude(_Event, frozen=True):
    """`ThoughtEndRequested`."""

    request: int


class Call(_Event, frozen=True):
    """`ToolsCalled`."""

    request: int


class Replace(_Event, frozen=True):
    pass


class Take(_Event, frozen=True):
    """`Taken`, by the numbers of the requests."""

    requests: list[int]


class SavedCells(msgspec.Struct, frozen=True, array_like=True):
    """`SavedRun`, whose ``cuts`` are positions and the numbers of keys; ``before``: the number of the note's key."""

    start: int
    cuts: list[tuple[int, int]]
    size_bytes: int
    on_disk: bool
    is_dropped: bool
    before: int
    tokens: list[int]
    tenant: str
    adapter: str


class Join(_Event, frozen=True):
    shard: str
    limits: ShardLimits
    runs: list[SavedCells]
    survived: bool


class Found(_Event, frozen=True):
    """`RunsFound`."""

    shard: str
    run_fingerprint: str
    runs: list[SavedCells]


class Lose(_Event, frozen=True):
    shard: str


class Drain(_Event, frozen=True):
    shard: str


class Sampled(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """A token that the sequence of this id got."""

    sequence: int
    token: int
    finish: FinishReason | None = None


class Step(_Event, frozen=True):
    """`Stepped`. Logprobs of prompts are counted; a logprob of minus infinity is null. ``missing``: media."""

    shard: str
    command: int
    outcome: StepOutcome
    seconds: float
    forward_s: float
    sample_s: float
    tokens: list[Sampled]
    prompt_logprobs: list[tuple[int, int]]
    drafts: list[tuple[int, DraftSource, int, int]]
    evaluations: list[tuple[int, list[tuple[int, float | None]]]]
    feedback: list[tuple[int, float]]
    missing: list[int]
    without_logits: list[int] = []


class Save(_Event, frozen=True):
    shard: str
    command: int
    saved: list[bool]
    sizes_bytes: list[int]
    seconds: float


class Load(_Event, frozen=True):
    shard: str
    command: int
    loaded: list[bool]
    bad_runs: list[int]  # their places among all that the command loads
    seconds: float


class Layout(_Event, frozen=True):
    shard: str
    command: int
    layout: LayoutLimits
    lost: list[int]
    seconds: float
    shares_beginnings: bool = False


class Fetch(_Event, frozen=True):
    transfer: int
    fetched: list[bool]
    seconds: float


class Encode(_Event, frozen=True):
    """`Encoded`."""

    encoding: int
    outcome: EncodeOutcome
    seconds: float


class End(_Event, frozen=True):
    shard: str
    command: int


# The number of a key that no shard has.
NO_KEY = -1


class Flush(_Event, frozen=True):
    """`FlushRequested`. ``key``: null for all prefixes."""

    flush: int
    shards: list[str]
    key: int | None


class Pin(_Event, frozen=True):
    """`PinRequested`. ``namespace``: the number of that of the prefix, null if it is not known."""

    pin: int
    key: int
    length: int
    tokens: list[int]
    namespace: int | None
    tenant: str
    adapter: str


class Unpin(_Event, frozen=True):
    """`Unpinned`, by the place of the pin among all; null if there is none."""

    pin: int | None


class Grace(_Event, frozen=True):
    """`GraceChanged`, null for no end."""

    seconds: float | None


class Undone(_Event, frozen=True):
    """`ActionFailed`."""


class Tick(_Event, frozen=True):
    pass


Event = (
    Submit | Cancel | Replace | Take | Join | Found | Lose | Drain | Step | Save | Load | Layout | Fetch | Encode | End
    | Conclude | Call | Flush | Pin | Unpin | Grace | Undone | Tick
)  # fmt: skip
