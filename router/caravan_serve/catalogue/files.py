"""The files of models, and what they say while no shard has them loaded."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from caravan_models.cached_model import found_model
from caravan_models.contents import SeenFile, SeenFiles, fingerprint
from caravan_models.errors import FetchError
from caravan_models.gguf_facts import gguf_facts, is_encoder
from caravan_proto.messages.model import MetadataValue, ModelFile
from caravan_scheduler.core.catalogue import CatalogueError, ModelDescription
from caravan_serve.catalogue.entries import CatalogueEntry

# Longer texts of the metadata are templates and licences.
_LONGEST_TEXT = 1023


@dataclass(frozen=True, slots=True, kw_only=True)
class FilesHere:
    """The files of a model that is here. ``size``: bytes of all. ``modified_s``: when one was last changed, in Unix
    time. ``fingerprint``, ``sha256``: those of its shards; the second is "" while nobody has read all of the files.
    """

    parts: tuple[Path, ...]
    size: int
    modified_s: float
    fingerprint: str
    sha256: str


def files_of(entry: CatalogueEntry, before: FilesHere | None = None) -> FilesHere:
    """Return the files of a model; ``before``, if nothing has changed since. Blocks. Raises CatalogueError."""
    try:
        model = found_model(entry.source)
        modified_s = max(part.stat().st_mtime for part in model.parts)
        sha256 = _known_sha256(model.parts)
        if before is not None and (before.parts, before.size, before.modified_s, before.sha256) == (
            model.parts,
            model.size,
            modified_s,
            sha256,
        ):
            return before
        tag = fingerprint(model.parts)
    except (FetchError, OSError) as error:
        raise CatalogueError(f"the files of {entry.name} cannot be read, or are not downloaded yet") from error
    return FilesHere(parts=model.parts, size=model.size, modified_s=modified_s, fingerprint=tag, sha256=sha256)


def _known_sha256(parts: Sequence[Path]) -> str:
    known = SeenFiles(model=tuple(map(SeenFile.at, parts))).known()
    return "" if known is None else known.model


def described_by(entry: CatalogueEntry, files: FilesHere) -> ModelDescription:
    """Return what the files say of their model. Blocks. Raises CatalogueError."""
    try:
        facts = gguf_facts(files.parts)
    except (FetchError, OSError) as error:
        raise CatalogueError(f"the files of {entry.name} are no model that can be read") from error
    return ModelDescription(
        file=ModelFile(
            name=entry.name,
            fingerprint=files.fingerprint,
            sha256=files.sha256,
            vocabulary_size=0,
            chat_template=facts.chat_template,
            bos_text="",
            eos_text="",
            trained_context=facts.trained_context or 0,
            architecture=facts.architecture,
            parameter_count=facts.parameter_count,
            weight_bytes=files.size,
            quantization=facts.quantisation,
            modified_s=int(files.modified_s),
            metadata=tuple(_shown(facts.metadata)),
        ),
        generates=not is_encoder(facts.architecture),
        fills=facts.fills,
    )


def _shown(metadata: Mapping[str, str | int | float | bool]) -> Iterator[tuple[str, MetadataValue]]:
    """Yield what the shards tell of the metadata, too."""
    for key, value in sorted(metadata.items()):
        if not isinstance(value, float) and not (isinstance(value, str) and len(value.encode()) > _LONGEST_TEXT):
            yield key, value
