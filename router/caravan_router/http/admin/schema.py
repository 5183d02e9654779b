"""Replies of the routes for operators."""

from typing import Literal

import msgspec

from caravan_router.core.shards import ShardState


class CachedPrefix(msgspec.Struct, frozen=True, kw_only=True):
    """The tokens of one ended sequence.

    ``cells``: KV cells that evicting this prefix alone would free; cells that other sequences share do not count.
    ``tenant``: name of the API key whose requests may use it, null without API keys. ``idle_s``: seconds since the
    sequence ended or another last started from it.
    """

    tokens: int
    cells: int
    tenant: str | None
    adapter: str | None
    idle_s: float


class ShardPrefixes(msgspec.Struct, frozen=True, kw_only=True):
    """Prefixes on one shard, the least recently used first. Together they hold ``cells`` KV cells.

    ``memory_bytes`` and ``disk_bytes``: size of the prefixes that are saved in host memory and on disk.
    """

    shard: str
    cells: int
    memory_bytes: int
    disk_bytes: int
    prefixes: list[CachedPrefix]


class CachedPrefixes(msgspec.Struct, frozen=True):
    """Prefixes by shard."""

    shards: list[ShardPrefixes]


class ShardLimits(msgspec.Struct, frozen=True, kw_only=True):
    """The capacity of a shard. ``cells`` and ``cells_per_sequence`` depend on its layout."""

    max_sequences: int
    max_batch_tokens: int
    cells: int
    cells_per_sequence: int


class ShardSpeculation(msgspec.Struct, frozen=True, kw_only=True):
    """Whether requests may have draft tokens on a shard.

    ``max_draft_tokens``: most of a step, 0 for none. ``off_because``: why there are none, null if there may be some.
    ``equal_lengths``: all sequences of a step have drafts of one length or none has, since llama.cpp would read the
    weights again for longer ones; so in the split layout.
    ``batch_invariant``: the shard computes the same logits, bit by bit, for a token alone and with others of its
    sequence, so drafts change no text; null if it was not measured. Where it is false, they can, by rounding.
    """

    max_draft_tokens: int
    off_because: str | None
    equal_lengths: bool
    batch_invariant: bool | None


class Shard(msgspec.Struct, frozen=True, kw_only=True):
    """A shard that the router knows, whatever its state.

    ``state``: joining (it has not served yet), standby (another router holds it), serving, draining (no new requests),
    refused (it may not serve beside the others) or lost (it served before). The shard has been in it for ``state_s``
    seconds. ``reason``: why it does not serve, null if there is nothing to say. ``next_try_s``: seconds until the
    router asks it again, null while it is being asked or serves. ``epoch``: number of the router's last lease, 0 before
    the first. ``shard_id``, ``version``, ``model``, ``limits``, ``layout`` and ``speculation``: what the shard says of
    itself, null until it has answered. ``sequences`` run there now and use ``used_cells`` KV cells.
    """

    address: str
    state: ShardState
    state_s: float
    reason: str | None
    next_try_s: float | None
    epoch: int
    shard_id: str | None
    version: str | None
    model: str | None
    limits: ShardLimits | None
    layout: Literal["unified", "split"] | None
    speculation: ShardSpeculation | None
    sequences: int
    used_cells: int


class Shards(msgspec.Struct, frozen=True):
    """The shards whose addresses are known."""

    shards: list[Shard]
