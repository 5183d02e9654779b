"""The work of a shard: the commands of a router, which are not checked yet, and what the shard asks of itself."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace

from caravan_models.contents import Contents, SeenFile
from caravan_proto.messages.commands import Command, Prefill, SequenceParameters
from caravan_proto.messages.constraint import Constraint
from caravan_shard.arrays import State
from caravan_shard.constraints.grammar import Grammar
from caravan_shard.sampling.processors import ProcessorRegistry, Processors


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredRun:
    """The cells [start, end) of a sequence, ``size`` bytes; without cells, its recurrent state there.

    The last of ``keys`` names the run.

    ``note``: what the router wants to know of the run; any bytes.
    """

    start: int
    cuts: Sequence[int]
    keys: Sequence[bytes]
    size: int
    note: bytes = b""

    @property
    def key(self) -> bytes:
        """The name of the run."""
        return self.keys[-1]

    @property
    def end(self) -> int:
        """The position behind its last cell."""
        return self.cuts[-1]


@dataclass(frozen=True, slots=True)
class EmbedText:
    """Embed one text, which was checked before. Needs no lease, since it touches no sequence."""

    tokens: Sequence[int]


@dataclass(frozen=True, slots=True)
class Adopt:
    """Keep a run of another shard, whose bytes were checked. Needs no turn, since it touches no sequence."""

    run: StoredRun
    state: State


@dataclass(frozen=True, slots=True)
class KnowContents:
    """Note what is in the files of the model, and call ``use_saved``. Needs no turn, as `Adopt`."""

    contents: Contents
    use_saved: Callable[[], None]


@dataclass(frozen=True, slots=True)
class LoadAdapter:
    """Load the adapter in ``file``, which was checked, under ``key``. Needs no turn, since it touches no sequence.

    It is refused if the lease has ``most`` others already.
    """

    key: str
    file: SeenFile
    scale: float
    most: int


@dataclass(frozen=True, slots=True)
class UnloadAdapter:
    """Free an adapter that `LoadAdapter` has loaded. Needs no turn."""

    key: str


@dataclass(frozen=True, slots=True)
class DropAdapters:
    """Free every adapter that `LoadAdapter` has loaded: the lease changed hands or ended.

    It has the queue of `LoadAdapter`, so that it never frees what the next lease has loaded.
    """


Aside = EmbedText | Adopt | KnowContents | LoadAdapter | UnloadAdapter | DropAdapters


@dataclass(frozen=True, slots=True)
class ReleaseAll:
    """Release every sequence: the lease changed hands or ended. Saved runs stay."""


Work = Command | Aside | ReleaseAll


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedParameters(SequenceParameters):
    """``grammar``: the compiled constraint; None without one.

    ``processors``: the functions that ``sampling.processors`` is the key of; None if there are none.
    """

    grammar: Grammar | None = None
    processors: Processors | None = None

    @property
    def trace_id(self) -> str:
        """The id of the trace, which a valid ``traceparent`` has behind its version; empty without one."""
        return self.traceparent[3:35]

    @property
    def is_sampled(self) -> bool:
        """Whether the span of the request is recorded: the lowest bit of the flags at the end of ``traceparent``."""
        return self.traceparent[-1:] in set("13579bdf")


def prepared(command: Prefill, grammars: Mapping[Constraint, Grammar], processors: ProcessorRegistry) -> Prefill:
    """Return ``command`` with the `PreparedParameters` of the sequences that it starts.

    ``grammars`` holds the compiled ones of its constraints.
    """

    def prepare(setup: SequenceParameters) -> PreparedParameters:
        return PreparedParameters(
            **{field.name: getattr(setup, field.name) for field in fields(SequenceParameters)},
            grammar=None if setup.constraint is None else grammars[setup.constraint],
            processors=processors.find(setup.sampling.processors),
        )

    chunks = [chunk if chunk.setup is None else replace(chunk, setup=prepare(chunk.setup)) for chunk in command.chunks]
    return replace(command, chunks=chunks)
