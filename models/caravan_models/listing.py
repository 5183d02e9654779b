"""Decides which files of a repository are the model that is asked for. Knows file names and sizes only."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import assert_never

from caravan_models.errors import FetchError, FetchProblem
from caravan_models.reference import DEFAULT_QUANTISATION, HubModel, NamedFile, Quantisation

_SPLIT = re.compile(r"-(\d{5})-of-(\d{5})$")
# The last one in a file's name counts: `Llama-Q8_0-embed-Q4_K_M` is a Q4_K_M. The prefix is Unsloth's.
_TAG = re.compile(
    r"(?:^|[-._])((?:UD-)?(?:I?Q\d(?:_[0-9A-Z]+)*|TQ\d_\d|BF16|FP?16|FP?32|MXFP4(?:_MOE)?|NVFP4))(?=$|[-.])",
    re.IGNORECASE,
)
_DYNAMIC = "UD-"
# From the best to use on.
_PROJECTOR_TYPES = ("F16", "BF16", "Q8_0", "F32")
_SHOWN = 40


@dataclass(frozen=True, slots=True)
class RepositoryFile:
    """A file of a repository. ``etag`` names its content: a SHA-256, or of small files the SHA-1 that Git gives it."""

    path: str
    size: int
    etag: str

    @property
    def folder(self) -> str:
        """The folder within the repository; empty for its root."""
        return self.path.rpartition("/")[0]


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """The files of one model: its parts in order, and the projector for pictures beside them."""

    parts: tuple[RepositoryFile, ...]
    projector: RepositoryFile | None = None

    @property
    def all(self) -> tuple[RepositoryFile, ...]:
        """Every file."""
        return self.parts if self.projector is None else (*self.parts, self.projector)


@dataclass(frozen=True, slots=True)
class _Group:
    """The files of one model. ``total``: how many parts their names speak of."""

    folder: str
    stem: str
    total: int
    parts: dict[int, RepositoryFile] = field(default_factory=dict)

    @property
    def files(self) -> tuple[RepositoryFile, ...]:
        return tuple(part for _, part in sorted(self.parts.items()))

    @property
    def quantisation(self) -> str:
        return quantisation_of(self.stem) or quantisation_of(self.folder)

    @property
    def is_whole(self) -> bool:
        return self.parts.keys() == set(range(1, self.total + 1))

    @property
    def label(self) -> str:
        """How an operator names it after the repository."""
        return self.files[0].path


def quantisation_of(stem: str) -> str:
    """Return the quantisation that a file's name without its suffix speaks of, in upper case; empty if it has none."""
    found = _TAG.findall(stem)
    name = found[-1].upper() if found else ""
    return {"FP16": "F16", "FP32": "F32"}.get(name, name)


def is_projector(path: str) -> bool:
    """Whether the file's name is that of a projector, which is no model by itself."""
    return "mmproj" in path.rpartition("/")[2].lower()


def title_of(path: str) -> str:
    """Return the name of a model's file without its quantisation and its number among the files of the model."""
    stem = path.rpartition("/")[2].removesuffix(".gguf")
    split = _SPLIT.search(stem)
    stem = stem[: split.start()] if split else stem
    tags = list(_TAG.finditer(stem))
    return stem[: tags[-1].start()] if tags else stem


def part_names(name: str) -> tuple[str, ...]:
    """Return the names of all parts of the model of which ``name`` is a part; ``name`` alone if it is whole."""
    stem = name.removesuffix(".gguf")
    split = _SPLIT.search(stem)
    if split is None:
        return (name,)
    total = split.group(2)
    return tuple(f"{stem[: split.start()]}-{number:05}-of-{total}.gguf" for number in range(1, int(total) + 1))


def is_model(path: str) -> bool:
    """Whether the file's name is that of a model."""
    name = path.rpartition("/")[2].lower()
    return name.endswith(".gguf") and not is_projector(path) and "imatrix" not in name


def choose(reference: HubModel, files: Sequence[RepositoryFile]) -> ModelFiles:
    """Return the files of the model that ``reference`` means, the usual one if it does not say. Raises FetchError."""
    group = _usual(reference, files) or _chosen(reference, files)
    if not group.is_whole:
        raise FetchError(
            FetchProblem.MISSING_PARTS,
            f"{reference.repository} has {len(group.parts)} of the {group.total} parts of {group.label}; choose "
            "another model, or another revision with @",
        )
    return ModelFiles(group.files, _projector(files, group))


def choose_to_remove(reference: HubModel, files: Sequence[RepositoryFile]) -> ModelFiles:
    """Return the files of the model, also if some are missing. Its projector is one of them if no other model needs it.

    Raises FetchError.
    """
    group = _chosen(reference, files)
    others = [other for other in _groups(files) if other.files != group.files]
    return ModelFiles(group.files, None if others else _projector(files, group))


def models_in(files: Sequence[RepositoryFile]) -> list[tuple[str, str, ModelFiles]]:
    """Return the whole models among ``files``: what to write after the colon, the quantisation, the files."""
    groups = _groups(files)
    return [
        (label, group.quantisation, ModelFiles(group.files, _projector(files, group)))
        for group, label in zip(groups, _labels(groups), strict=True)
        if group.is_whole
    ]


def _usual(reference: HubModel, files: Sequence[RepositoryFile]) -> _Group | None:
    """Return the model in DEFAULT_QUANTISATION if ``reference`` leaves the choice and there is exactly one."""
    if reference.choice is not None:
        return None
    found = _quantised(_groups(files), DEFAULT_QUANTISATION)
    return found[0] if len(found) == 1 else None


def _chosen(reference: HubModel, files: Sequence[RepositoryFile]) -> _Group:
    groups = _groups(files)
    match reference.choice:
        case None:
            found = groups
        case Quantisation(name):
            found = _quantised(groups, name)
        case NamedFile(path):
            found = _holding(reference, files, groups, path)
        case _:
            assert_never(reference.choice)
    if not groups:
        raise FetchError(
            FetchProblem.NO_MODEL,
            f"{reference.repository} has no model in a GGUF file; look for a repository whose name ends with -GGUF",
        )
    if not found:
        raise FetchError(
            FetchProblem.NO_QUANTISATION,
            f"{reference.repository} has no {reference.name.partition(':')[2]}; it has {_options(groups)}",
        )
    if len(found) > 1:
        raise FetchError(
            FetchProblem.AMBIGUOUS,
            f"{reference.name} can be one of several models; add one to it after a colon: {_options(found)}",
        )
    return found[0]


def _groups(files: Iterable[RepositoryFile]) -> list[_Group]:
    """Return the models of a repository, each with its parts."""
    groups: dict[tuple[str, str, int], _Group] = {}
    for file in sorted(files, key=lambda file: file.path):
        if not is_model(file.path):
            continue
        folder, _, name = file.path.rpartition("/")
        stem = name[: -len(".gguf")]
        split = _SPLIT.search(stem)
        number, total = (int(split[1]), int(split[2])) if split else (1, 1)
        stem = stem[: split.start()] if split else stem
        key = (folder, stem, total if split else 0)
        groups.setdefault(key, _Group(folder, stem, total)).parts[number] = file
    return list(groups.values())


def _quantised(groups: Sequence[_Group], name: str) -> list[_Group]:
    """Return the models with this quantisation; the plain one before Unsloth's dynamic one."""
    wanted = quantisation_of(name) or name
    plain = [group for group in groups if group.quantisation == wanted]
    return plain or [group for group in groups if group.quantisation == f"{_DYNAMIC}{wanted}"]


def _holding(reference: HubModel, files: Sequence[RepositoryFile], groups: Sequence[_Group], path: str) -> list[_Group]:
    if is_projector(path):
        raise FetchError(
            FetchProblem.IS_PROJECTOR,
            f"{path} is a projector for images, not a model; name the model, and it comes along. "
            f"{reference.repository} has {_options(groups)}",
        )
    if all(file.path != path for file in files):
        raise FetchError(FetchProblem.NO_FILE, f"{reference.repository} has no file {path}; it has {_options(groups)}")
    return [group for group in groups if any(part.path == path for part in group.files)]


def _projector(files: Iterable[RepositoryFile], group: _Group) -> RepositoryFile | None:
    """Return the projector beside a model: that of its folder before that of the root, the most usual type first."""
    found = [
        file
        for file in files
        if is_projector(file.path) and file.path.lower().endswith(".gguf") and file.folder in {group.folder, ""}
    ]

    def preference(file: RepositoryFile) -> tuple[bool, int, str]:
        kind = quantisation_of(file.path.rpartition("/")[2][: -len(".gguf")])
        known = _PROJECTOR_TYPES.index(kind) if kind in _PROJECTOR_TYPES else len(_PROJECTOR_TYPES)
        return file.folder != group.folder, known, file.path

    return min(found, key=preference, default=None)


def _options(groups: Sequence[_Group]) -> str:
    """Return what can be written after the colon: quantisations where they tell models apart, else files."""
    if not groups:
        return "no model in a GGUF file"
    labels = _labels(groups)
    sizes = [sum(part.size for part in group.files) for group in groups]
    shown = [f"{label} ({size_text(size)})" for label, size in list(zip(labels, sizes, strict=True))[:_SHOWN]]
    more = f" and {len(labels) - _SHOWN} more" if len(labels) > _SHOWN else ""
    return f"{', '.join(shown)}{more}"


def _labels(groups: Sequence[_Group]) -> list[str]:
    """Return for each model what to write after the colon."""
    tags = [group.quantisation for group in groups]
    return [tag if tag and tags.count(tag) == 1 else group.label for tag, group in zip(tags, groups, strict=True)]


def size_text(size: int) -> str:
    """Return a size in bytes as people read it, such as "98.4 MB"."""
    if size < 1000:
        return f"{size} bytes"
    value, units = size / 1000, ["kB", "MB", "GB"]
    while value >= 999.95 and len(units) > 1:
        value /= 1000
        units.pop(0)
    return f"{value:.1f} {units[0]}"
