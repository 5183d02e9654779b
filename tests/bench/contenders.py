"""The servers to compare: what is started with which flags."""

from collections.abc import Collection
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

from bench.paths import ROOT, peer


class Product(StrEnum):
    """The programs to compare."""

    CARAVAN = "Caravan"
    LLAMA_SERVER = "llama-server"


@dataclass(frozen=True, slots=True, kw_only=True)
class Common:
    """The settings that all servers of a comparison share."""

    model: Path
    threads: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """A server to compare. ``name`` is unique in its lineup; ``flags`` are those beside threads, cells and slots.

    Caravan is that of ``checkout``. Its processor time is that of its router, and of all its processes if it
    ``counts_shards``.
    """

    name: str
    product: Product
    slots: int
    cells: int
    flags: tuple[str, ...] = ()
    checkout: Path = ROOT
    counts_shards: bool = False

    def command(self, common: Common, port: int) -> list[str]:
        """Return the command that serves on ``port`` of 127.0.0.1."""
        flags = ["-m", str(common.model), "-np", str(self.slots), "-c", str(self.cells), "-t", str(common.threads)]
        flags += ["--port", str(port), *self.flags]
        if self.product is Product.CARAVAN:
            return [str(self.checkout / ".venv" / "bin" / "caravan"), "serve", *flags]
        return [str(peer("llama-server")), *flags, "--host", "127.0.0.1", "--no-webui"]


@dataclass(frozen=True, slots=True)
class Lineup:
    """Servers that are resident at the same time. Each of ``peers`` is compared with ``ours``.

    ``api``: the one of ``caravan bench`` that all of them speak.
    """

    ours: Contender
    peers: tuple[Contender, ...]
    api: str = "completions"

    def only(self, names: Collection[str]) -> "Lineup":
        """Return the lineup with those peers alone that ``names`` has."""
        return replace(self, peers=tuple(peer for peer in self.peers if peer.name in names))

    def beside(self, checkout: Path) -> "Lineup":
        """Return the lineup with the Caravan of ``checkout`` as the only peer."""
        ours = replace(self.ours, counts_shards=True)
        return replace(self, ours=ours, peers=(replace(ours, name="before", checkout=checkout),))


def against_llama_server(*, slots: int, cells: int) -> Lineup:
    """Return Caravan with its defaults, and llama-server with its defaults in both layouts of its KV cache."""
    ours = Contender(name="Caravan", product=Product.CARAVAN, slots=slots, cells=cells)
    peers = (
        Contender(name="split", product=Product.LLAMA_SERVER, slots=slots, cells=cells, flags=("-no-kvu",)),
        Contender(name="unified", product=Product.LLAMA_SERVER, slots=slots, cells=cells, flags=("-kvu",)),
    )
    return Lineup(ours, peers)


def for_agents(*, slots: int, cells: int, sessions: int, host_memory: bool) -> Lineup:
    """Return Caravan and llama-server, which both keep prefixes in host memory too if there is ``host_memory``.

    llama-server has its unified layout: a session does not fit into a part of the cells for each slot. It has as many
    slots as ``sessions`` have cells, since it ends requests with an error once its cells are full.
    """
    flags = () if host_memory else ("--cache-ram", "0")
    ours = Contender(name="Caravan", product=Product.CARAVAN, slots=slots, cells=cells, flags=flags)
    peer = Contender(
        name="llama-server", product=Product.LLAMA_SERVER, slots=sessions, cells=cells, flags=("-kvu", *flags)
    )
    return Lineup(ours, (peer,))


def that_embed(*, slots: int, cells: int) -> Lineup:
    """Return Caravan and llama-server, which both take the mean of a text's states for its vector."""
    ours = Contender(
        name="Caravan",
        product=Product.CARAVAN,
        slots=slots,
        cells=cells,
        flags=("--embeddings", "on", "--pooling", "mean"),
    )
    peer = Contender(
        name="llama-server",
        product=Product.LLAMA_SERVER,
        slots=slots,
        cells=cells,
        flags=("--embeddings", "--pooling", "mean"),
    )
    return Lineup(ours, (peer,), api="embeddings")


def ample_cells(*, slots: int, scarce: int, ample: int) -> Lineup:
    """Return Caravan with too few KV cells, and with enough of them."""
    ours = Contender(name="scarce", product=Product.CARAVAN, slots=slots, cells=scarce)
    return Lineup(ours, (Contender(name="ample", product=Product.CARAVAN, slots=slots, cells=ample),))


def spin_counts(*counts: int, slots: int, cells: int) -> Lineup:
    """Return Caravan with its default spin count, and with each of ``counts``."""
    ours = Contender(name="default", product=Product.CARAVAN, slots=slots, cells=cells)
    peers = tuple(
        Contender(
            name=f"spin-{count}",
            product=Product.CARAVAN,
            slots=slots,
            cells=cells,
            flags=("--spin-count", str(count)),
        )
        for count in counts
    )
    return Lineup(ours, peers)
