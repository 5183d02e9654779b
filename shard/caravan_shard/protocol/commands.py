"""The work of a shard: the commands of a router, which are not checked yet, and what the shard asks of itself."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from caravan_models.contents import Contents
from caravan_proto.messages.commands import Command
from caravan_shard.arrays import State
from caravan_shard.protocol.run import StoredRun


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
class ReleaseAll:
    """Release every sequence: the lease changed hands or ended. Saved runs stay."""


Work = Command | EmbedText | Adopt | KnowContents | ReleaseAll
