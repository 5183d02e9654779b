"""Replies of the routes for operators."""

from typing import Any, Literal

import msgspec

from caravan_dialects.api.generation.schema import CacheSalt, ModelName
from caravan_dialects.api.openai.chat.schema import Message, Tool
from caravan_scheduler.core.shards import ShardState


class CachedPrefix(msgspec.Struct, frozen=True, kw_only=True):
    """The tokens of one ended sequence, as far as a shard keeps them.

    ``id`` is the same on all shards and after a restart. ``cells``: KV cells that evicting this prefix alone would
    free; cells that other sequences share do not count. ``memory_bytes`` and ``disk_bytes``: size of what is saved of
    it, without what is saved of a shorter prefix that it begins with.
    ``tenant``: name of the API key whose requests may use it, null without API keys. ``idle_s``: seconds since the
    sequence ended or another last started from it, or since the shard came with it. ``pinned``: what is saved of it
    does not make way for others.
    """

    id: str
    tokens: int
    cells: int
    memory_bytes: int
    disk_bytes: int
    tenant: str | None
    adapter: str | None
    idle_s: float
    pinned: bool


class RunningSequence(msgspec.Struct, frozen=True, kw_only=True):
    """A sequence that starts or runs. The first ``tokens`` of it are in the cache.

    ``request_id``: that of its request. A request for several choices has several sequences.
    """

    request_id: str
    tokens: int
    tenant: str | None
    adapter: str | None


class ShardPrefixes(msgspec.Struct, frozen=True, kw_only=True):
    """Prefixes on one shard, the least recently used first. Together they hold ``cells`` KV cells.

    ``memory_bytes`` and ``disk_bytes``: size of the prefixes that are saved in host memory and on disk;
    ``pinned_bytes``: of those that are pinned. ``running``: the sequences that run there, whose cells
    are not counted; empty where evicted prefixes are returned.
    """

    shard: str
    cells: int
    memory_bytes: int
    disk_bytes: int
    pinned_bytes: int
    prefixes: list[CachedPrefix]
    running: list[RunningSequence]


class PrefixPlace(msgspec.Struct, frozen=True, kw_only=True):
    """What one shard has of a prefix. The fields are those of the list of prefixes."""

    shard: str
    cells: int
    memory_bytes: int
    disk_bytes: int
    idle_s: float


class Prefix(msgspec.Struct, frozen=True, kw_only=True):
    """One prefix, of ``tokens`` tokens, and the shards that have it: a pinned one may be on none."""

    id: str
    model: str
    tokens: int
    tenant: str | None
    adapter: str | None
    pinned: bool
    shards: list[PrefixPlace]


class CachedPrefixes(msgspec.Struct, frozen=True):
    """Prefixes by shard, and all pinned ones, wherever they are."""

    shards: list[ShardPrefixes]
    pins: list[Prefix]


class PrefixContent(Prefix, frozen=True, kw_only=True):
    """One prefix with its tokens and their text, which is a user's. Both are null if they are not known."""

    token_ids: list[int] | None
    text: str | None


class PinRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A prefix to compute and to pin: ``prompt``, as text or as token ids, or ``messages``.

    ``tools``, ``tool_prompt``, ``chat_template_kwargs`` and ``add_generation_prompt`` go with ``messages``, as in chat
    completions; but the assistant's turn is opened only if ``add_generation_prompt`` is true. ``tenant``: name of the
    API key whose requests may use the prefix; left out: the operator's own. ``model``: see the header ``X-Model``.
    """

    model: ModelName = None
    prompt: str | list[int] | None = None
    messages: list[Message] | None = None
    tools: list[Tool] | None = None
    tool_prompt: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    tenant: str | None = None
    cache_salt: CacheSalt = None


class ShardLimits(msgspec.Struct, frozen=True, kw_only=True):
    """The capacity of a shard. ``cells`` and ``cells_per_sequence`` depend on its layout."""

    max_sequences: int
    max_batch_tokens: int
    cells: int
    cells_per_sequence: int


class ShardSpeculation(msgspec.Struct, frozen=True, kw_only=True):
    """Whether requests may have draft tokens on a shard.

    ``max_draft_tokens``: maximum per step, 0 for none. ``off_because``: why there are none, null if there may be some.
    ``equal_lengths``: all sequences of a step have drafts of one length, or none, since llama.cpp would read the
    weights again for longer ones; so in the split layout.
    """

    max_draft_tokens: int
    off_because: str | None
    equal_lengths: bool


class ShardNumerics(msgspec.Struct, frozen=True, kw_only=True):
    """How a shard computes logits. It follows from the model, the build, the processor and the flags alone.

    ``fingerprint``: shards of an equal one compute the same logits, bit by bit. ``exact``: it was started with --exact.
    ``flash_attention``: whether each layout may use it. ``same_in_company``: as compared at the start, the logits after
    a token do not depend on other sequences; false in the unified layout. ``same_in_chunks``: nor on how many of the
    tokens of its sequence are computed with it, so that drafts change no text; if false, they can, by rounding.
    Null if not compared. ``kernels``: own (llama.cpp was built with Caravan's), sampling (only sampling and log
    probabilities are Caravan's) or stock; null if unknown.
    """

    fingerprint: str
    exact: bool
    flash_attention: dict[str, bool]
    same_in_company: bool | None
    same_in_chunks: bool | None
    kernels: Literal["own", "sampling", "stock"] | None


class LoadedAdapter(msgspec.Struct, frozen=True, kw_only=True):
    """An adapter in the memory of a shard. ``size_bytes``: of its file. One that is being unloaded is there, too."""

    name: str
    size_bytes: int


class Shard(msgspec.Struct, frozen=True, kw_only=True):
    """A shard that the router knows, whatever its state.

    ``state``: joining (it has not served yet), standby (another router holds it), serving, draining (no new requests),
    refused (it may not serve beside the others) or lost (it served before). The shard has been in it for ``state_s``
    seconds. ``reason``: why it does not serve, null if there is nothing to say. ``next_try_s``: seconds until the
    router asks it again, null while it is being asked or serves. ``epoch``: number of the router's last lease, 0 before
    the first. ``shard_id``, ``version``, ``model``, ``model_fingerprint``, ``limits``, ``layout``, ``speculation`` and
    ``numerics``: what the shard says of itself, null until it has answered. ``model_fingerprint``: SHA-256 of the
    model's file, of several parts that of their digests, null also until the shard has read them. Shards whose
    ``model`` is one and whose ``model_fingerprint`` differ have different weights under one name. ``sequences`` run
    there now and use ``used_cells`` KV cells. ``adapters``: those that were loaded while it ran.
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
    model_fingerprint: str | None
    limits: ShardLimits | None
    layout: Literal["unified", "split"] | None
    speculation: ShardSpeculation | None
    numerics: ShardNumerics | None
    sequences: int
    used_cells: int
    adapters: list[LoadedAdapter]


class LoadAdapterRequest(msgspec.Struct, frozen=True, kw_only=True):
    """An adapter to load on every shard of a model.

    ``lora_path``: of a GGUF file, in the folder that the shards have for ``--lora-dir``. ``load_inplace``: replace the
    loaded adapter of this name. ``scale``: the effect is multiplied by it. ``model``: see the header ``X-Model``.
    """

    lora_name: str
    lora_path: str
    load_inplace: bool | None = None
    scale: float | None = None
    model: ModelName = None


class UnloadAdapterRequest(msgspec.Struct, frozen=True, kw_only=True):
    """An adapter to unload, which `LoadAdapterRequest` has loaded. ``lora_int_id`` has no effect."""

    lora_name: str
    lora_int_id: int | None = None


class Shards(msgspec.Struct, frozen=True):
    """The shards whose addresses are known."""

    shards: list[Shard]
