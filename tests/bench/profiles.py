"""The profiles of the comparison: which rows to measure, and how often."""

from dataclasses import dataclass
from pathlib import Path

from bench.rows import SHARED_PREFIX, STALL, Group, N, decode, overload, plain
from bench.servers import Layout, Setting

_CELLS = 24576
# A quarter of the cells that eight prompts of 600 tokens with 64 output tokens need. Split, none of them would fit.
_SCARCE_CELLS = 1280


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Groups of runs, and the number of ``rounds``. ``batches`` are the batch sizes to measure the bare engine with."""

    name: str
    rounds: int
    groups: tuple[Group, ...]
    batches: tuple[int, ...] = (1, 8, 32)


def quick(model: Path, threads: int) -> Profile:
    """One round of the main rows."""
    main = Setting(model=model, slots=8, cells=_CELLS, threads=threads)
    wide = Setting(model=model, slots=32, cells=_CELLS, threads=threads)
    return Profile(
        name="quick",
        rounds=1,
        groups=(
            Group("8 slots", main, (plain(1, 4), plain(8, 16), plain(32, 32), decode(1), decode(8), STALL)),
            Group("32 slots", wide, (decode(32),)),
        ),
    )


def pool(model: Path, threads: int) -> Profile:
    """One round of the rows that profit from one pool of KV cells, and one plain row to compare with."""
    main = Setting(model=model, slots=8, cells=_CELLS, threads=threads)
    scarce = Setting(model=model, slots=8, cells=_SCARCE_CELLS, threads=threads)
    return Profile(
        name="pool",
        rounds=1,
        groups=(
            Group("8 slots", main, (plain(8, 16), SHARED_PREFIX, N, overload("ample cells"))),
            Group("8 slots, 1,280 cells", scarce, (overload("scarce cells"),), (Layout.UNIFIED,)),
        ),
        batches=(),
    )


def full(model: Path, threads: int) -> Profile:
    """Three rounds of every row."""
    main = Setting(model=model, slots=8, cells=_CELLS, threads=threads)
    wide = Setting(model=model, slots=32, cells=_CELLS, threads=threads)
    scarce = Setting(model=model, slots=8, cells=_SCARCE_CELLS, threads=threads)
    return Profile(
        name="full",
        rounds=3,
        groups=(
            Group(
                "8 slots",
                main,
                (
                    plain(1, 8),
                    plain(8, 32),
                    plain(32, 64),
                    decode(1),
                    decode(8),
                    STALL,
                    SHARED_PREFIX,
                    N,
                    overload("ample cells"),
                ),
            ),
            Group("32 slots", wide, (plain(32, 64), decode(32))),
            Group("8 slots, 1,280 cells", scarce, (overload("scarce cells"),), (Layout.UNIFIED,)),
        ),
    )
