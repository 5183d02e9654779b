"""The messages of the timeline, as JSON objects with a ``type``. Times are seconds on one clock of the router.

A request is its number, unique in the router. A field that has its default is left out.
"""

from collections.abc import Mapping
from typing import Annotated, Literal

import msgspec

from caravan_scheduler.core.recomputed import Reason

VERSION = 1

What = Literal["submit", "start", "resume", "swap", "recompute", "end", "fail", "cancel", "join", "lost", "drain"]
BlockKind = Literal["prefill", "decode", "evaluate", "save", "load", "layout", "release", "fetch"]
RunningStatus = Literal["starting", "loaded", "prefill", "decode", "leaving"]
Holder = Annotated[int, msgspec.Meta(description="Number of a request")]


class Hello(msgspec.Struct, frozen=True, tag_field="type", tag="hello", kw_only=True):
    """The first message. ``at`` on the router's clock is ``unix`` in Unix time.

    A frame comes every ``frame_s`` seconds at most, a state every ``state_s``.
    """

    version: int = VERSION
    at: float
    unix: float
    frame_s: float
    state_s: float


class Chunk(msgspec.Struct, frozen=True, array_like=True):
    """Tokens of a prompt in one step, from position ``start`` on; after the ``last`` one a token is sampled."""

    request: Holder
    start: int
    tokens: int
    last: bool


class Moved(msgspec.Struct, frozen=True, array_like=True):
    """Cells of a request that were copied out of the cache or into it."""

    request: Holder
    cells: int


class Block(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A command of a shard, or the part of it since the last frame: the steps of a decode are one block.

    ``busy``: seconds of its steps on the shard, ``forward`` those of the forward passes, together. ``tokens`` were
    sampled. ``failed``: steps that changed nothing, as the cache was full. ``riders``: requests that got a token in
    each step. ``moved``: what a save or a load copied. ``bytes`` and ``source``: what a fetch copies, from which shard.
    """

    shard: str
    kind: BlockKind
    command: int
    start: float
    end: float
    steps: int = 0
    busy: float = 0.0
    forward: float = 0.0
    tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    failed: int = 0
    chunks: list[Chunk] = []
    riders: list[Holder] = []
    moved: list[Moved] = []
    bytes: int = 0
    source: str = ""


class Mark(msgspec.Struct, frozen=True, array_like=True):
    """What happened to a request or to a shard.

    ``number``: the tokens of the prompt with ``submit``, those in the cache with ``start``, those computed again with
    ``resume``. ``shard`` is the reason with ``fail``. ``computed``: with ``start``, how many tokens of the prompt are
    not in the cache, by reason.
    """

    at: float
    what: What
    request: Holder = 0
    shard: str = ""
    number: int = 0
    computed: Mapping[Reason, int] = {}


class Frame(msgspec.Struct, frozen=True, tag_field="type", tag="frame", kw_only=True):
    """What happened since the last frame."""

    model: str
    at: float
    blocks: list[Block]
    marks: list[Mark]


class Running(msgspec.Struct, frozen=True, array_like=True):
    """A sequence on a shard. ``target``: tokens that are computed before it decodes. ``cached`` of them were found."""

    request: Holder
    status: RunningStatus
    computed: int
    target: int
    output: int
    cached: int


class Cells(msgspec.Struct, frozen=True, array_like=True):
    """A run of cells, counted once however many share it: their holders end here or in the runs after it.

    ``parent``: the place of the run before it in the list, -1 for none. ``running``: requests that end here, ``kept``:
    ended ones.
    """

    parent: int
    cells: int
    running: list[Holder]
    kept: list[Holder]


class Run(msgspec.Struct, frozen=True, array_like=True):
    """A saved run of cells outside the cache, which begins in or at the end of the run ``parent``, -1 for none."""

    start: int
    end: int
    bytes: int
    tier: Literal["memory", "disk"]
    parent: int
    pinned: bool


class ShardPicture(msgspec.Struct, frozen=True, kw_only=True):
    """What a shard holds. ``used``: cells of running sequences, ``cached``: cells of ended ones alone.

    ``memory`` and ``disk``: bytes of saved runs, and their limit. ``more_cells``: those of runs that are not
    in ``map``. ``more_runs``: saved runs that are not in ``runs``.
    """

    shard: str
    draining: bool
    layout: Literal["unified", "split"]
    sequences: int
    max_sequences: int
    cells: int
    used: int
    cached: int
    step_s: float
    memory: tuple[int, int]
    disk: tuple[int, int]
    running: list[Running]
    map: list[Cells]
    more_cells: int
    runs: list[Run]
    more_runs: int


class Waiting(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A request in the queue, and what it waits for.

    ``reason``: ``no_shard`` is up; its ``prefix`` is computed by the request ``of``; a busy ``shard`` is the
    ``holder`` of its prefix; a ``fetch`` brings saved cells; the ``encoding`` of its images and audio is under way;
    no shard has ``cells``, or a free place for ``sequences``; shards are in a ``step``, or the next one is full; or
    it is not its ``turn``. ``key``: the name of its API key. ``session``: the ends of its session's id.
    ``saved_on``: the shard that saved what was computed of it. ``started``: it ran before.
    """

    request: Holder
    reason: Literal["no_shard", "prefix", "holder", "fetch", "encoding", "cells", "sequences", "step", "turn"]
    arrived: float
    tokens: int
    priority: int = 0
    key: str = ""
    session: str = ""
    of: int = 0
    shard: str = ""
    saved_on: str = ""
    started: bool = False


class Quantiles(msgspec.Struct, frozen=True, array_like=True):
    """The median and the 99th percentile, in seconds."""

    p50: float
    p99: float


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of the last ``window_s`` seconds, at most a minute and only while someone watches.

    ``tokens_s``: sampled tokens a second, ``prompt_tokens_s``: computed tokens of prompts. ``hit_rate``: part of the
    prompts' tokens that was in the cache. ``requests`` started. Null where there was none.
    """

    window_s: float
    tokens_s: float
    prompt_tokens_s: float
    ttft_s: Quantiles | None
    itl_s: Quantiles | None
    hit_rate: float | None
    steps_s: float
    requests: int


class State(msgspec.Struct, frozen=True, tag_field="type", tag="state", kw_only=True):
    """What is where now. ``queue``: the first that wait, in order; ``queued``: how many wait."""

    model: str
    at: float
    shards: list[ShardPicture]
    queue: list[Waiting]
    queued: int
    figures: Figures


class Gone(msgspec.Struct, frozen=True, tag_field="type", tag="gone", kw_only=True):
    """The model is no longer known."""

    model: str
    at: float


class Dropped(msgspec.Struct, frozen=True, tag_field="type", tag="dropped", kw_only=True):
    """This viewer read too slowly and missed ``count`` messages before the next one."""

    count: int


Message = Hello | Frame | State | Gone | Dropped
