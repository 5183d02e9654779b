"""Which servers are compared, and how many of them are in the card's memory at a time."""

from collections.abc import Iterator
from pathlib import Path

from bench.contenders import Contender, Lineup, Product

from caravan_shard.backends.llama.devices.devices import first_devices

DEFAULT, DEVICE_SAMPLING = "llama-server", "llama-server -bs"
_FLAGS = {DEFAULT: (), DEVICE_SAMPLING: ("--backend-sampling",)}
# Cells, buffers and what the driver keeps, of each server; a guess from above.
_BESIDE_WEIGHTS_BYTES = 5 << 30


def lineup(slots: int, cells: int, peers: tuple[str, ...]) -> Lineup:
    """Return Caravan and ``peers``, each with its defaults beside slots and cells."""
    ours = Contender(name="Caravan", product=Product.CARAVAN, slots=slots, cells=cells)
    return Lineup(
        ours,
        tuple(
            Contender(name=name, product=Product.LLAMA_SERVER, slots=slots, cells=cells, flags=_FLAGS[name])
            for name in peers
        ),
    )


def peer_groups(model: Path) -> Iterator[tuple[str, ...]]:
    """Return which peers are resident beside Caravan: both, or one after the other if the card is too small."""
    needed = (1 + len(_FLAGS)) * (model.stat().st_size + _BESIDE_WEIGHTS_BYTES)
    devices = first_devices()
    if not devices or needed <= devices[0].total_bytes:
        yield tuple(_FLAGS)
    else:
        yield from ((name,) for name in _FLAGS)
