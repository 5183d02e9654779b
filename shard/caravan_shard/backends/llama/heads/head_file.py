"""Finds out whether a draft model is a head that fits its model, before either is loaded."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TypeVar

from caravan_models.cached_model import parts_of
from caravan_models.errors import FetchError
from caravan_models.gguf_header import read_architecture, read_header
from caravan_shard.backends.base import DraftBlock
from caravan_shard.backends.llama.heads.dflash_file import block_of, is_causal, is_dspark, why_not_dflash
from caravan_shard.backends.llama.heads.eagle3_file import why_not_eagle3
from caravan_shard.backends.llama.heads.file_pair import FilePair
from caravan_shard.config import ShardConfig
from caravan_shard.startup_error import StartupError

_Read = TypeVar("_Read")

_EAGLE3, _DFLASH = "eagle3", "dflash"


class HeadKind(Enum):
    """Kinds of heads that are files of their own. ``spec_type``: what asks for it; ``title``: with an article."""

    EAGLE3 = "draft-eagle3", "an EAGLE-3 head"
    DFLASH = "draft-dflash", "a DFlash head"
    DSPARK = "draft-dspark", "a DSpark head"

    def __init__(self, spec_type: str, title: str) -> None:
        self.spec_type = spec_type
        self.title = title

    @property
    def method(self) -> str:
        """The name of the method."""
        return self.title.split()[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadFile:
    """What the file of a head says. ``layers``: those of the model whose inputs it reads.

    ``block``: how it drafts if it drafts blocks, in which rows see those before them only if it ``is_causal``.
    """

    kind: HeadKind
    layers: tuple[int, ...]
    block: DraftBlock | None = None
    is_causal: bool = False


def head_file(config: ShardConfig) -> HeadFile | None:
    """Return what the draft model is; None if there is none, or if it is no head.

    Raises StartupError if it must be one and is not, or is one that cannot be used. llama.cpp must be initialized.
    """
    if not config.model_draft:
        return None
    model, draft = Path(config.model), Path(config.model_draft)
    architecture = _read(read_architecture, draft)
    if architecture not in (_EAGLE3, _DFLASH):
        for kind in HeadKind:
            if kind.spec_type == config.spec_type:
                raise StartupError(
                    f"{draft.name} is no {kind.method} head, as --spec-type {config.spec_type} asks: its architecture "
                    f"is {architecture}"
                )
        return None
    files = FilePair(path=draft, head=_read(read_header, draft), model=_read(read_header, parts_of(model)[0]))
    kind = HeadKind.DSPARK if is_dspark(files) else HeadKind.DFLASH
    if architecture == _EAGLE3:
        kind = HeadKind.EAGLE3
    if config.spec_type not in ("auto", kind.spec_type):
        raise StartupError(f"{draft.name} is {kind.title}: pass --spec-type {kind.spec_type}")
    reason = why_not_eagle3(files) if kind is HeadKind.EAGLE3 else why_not_dflash(files)
    if reason:
        raise StartupError(f"{draft.name} cannot draft for {model.name}: {reason}")
    if kind is HeadKind.EAGLE3:
        return HeadFile(kind=kind, layers=files.layers)
    return HeadFile(kind=kind, layers=files.layers, block=block_of(files), is_causal=is_causal(files))


def _read(read: Callable[[Path], _Read], path: Path) -> _Read:
    try:
        return read(path)
    except (OSError, FetchError) as error:
        raise StartupError(f"cannot read {path}: {error}") from error
