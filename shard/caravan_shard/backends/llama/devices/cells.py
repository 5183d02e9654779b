"""How many cells a shard gets where no flag says so: as many as the model was trained for, or those that have room.

On devices they may take all that --fit-target leaves. On the host they take at most half of what the rest of the shard
leaves free: the other half is for saved prefixes and other programs.
"""

from caravan_shard.config import CELL_BLOCK, ShardConfig
from caravan_shard.memory_need import HOST, FreeMemory, MemoryNeed, in_words
from caravan_shard.model_flags import USUAL_CELLS

# llama.cpp's tables of a cell: its position, the sequences that have it (up to 256), and its place in sets of both.
CELL_BYTES = 128
# The part of the free memory, one in this many, that tables may take.
_TABLES_SHARE = 4
_HOST_SHARE = 2


def cell_numbers(config: ShardConfig, trained_context: int, free: FreeMemory) -> list[int | None]:
    """Return the numbers of cells to choose from, the largest first; [None] if the flags name one."""
    if config.ctx_size is not None:
        return [None]
    # Each sequence wants a block in the layout that all start with.
    least = max(config.fit_ctx, CELL_BLOCK * config.parallel)
    found = [max(config.longest_context(trained_context) or trained_context, USUAL_CELLS, least)]
    while found[-1] > least:
        found.append(max(least, found[-1] * 7 // 8 // CELL_BLOCK * CELL_BLOCK))
    return [*(number for number in found[:-1] if tables_fit(number, free.host)), found[-1]]


def tables_fit(cells: int, free_bytes: int | None) -> bool:
    """Whether the host has room for the tables of so many cells, which are made even to measure what they take."""
    return free_bytes is None or CELL_BYTES * cells <= free_bytes // _TABLES_SHARE


def leaves_host(need: MemoryNeed, free_bytes: int) -> bool:
    """Whether cells take no more of the host's ``free_bytes`` than a sensible default may."""
    parts = need.by_place[HOST]
    cells = sum(size for what, size in parts.items() if what.endswith(("cells", "cell_tables")))
    return cells <= (free_bytes - (need.places[HOST] - cells)) // _HOST_SHARE


def context_line(config: ShardConfig, cells: int, trained_context: int, need: MemoryNeed, free: FreeMemory) -> str:
    """Return in one line how large the context is and why. ``config``: before anything was chosen."""
    if config.ctx_size is not None:
        why = "as -c says" if config.ctx_size else f"trained for {trained_context:,}"
    elif not config.fit:
        why = "--fit off"
    elif cells < trained_context:
        why = f"as many of the trained {trained_context:,} as fit"
    else:
        why = f"trained for {trained_context:,}"
    sizes = [
        f"{in_words(kinds['cells'])} of KV on {place}, {in_words(room)} free"
        for place, kinds in need.by_place.items()
        if kinds.get("cells") and (room := free.of(place)) is not None
    ]
    return f"context {cells:,} cells ({'; '.join([why, *sizes])})"
