"""Which files of a folder are models."""

import re
from pathlib import Path

_SUFFIX = ".gguf"
_PART = re.compile(r"-(\d{5})-of-\d{5}$")
_PROJECTOR = re.compile(r"(^|[-_.])mmproj([-_.]|$)", re.IGNORECASE)


def models_in(folder: Path) -> list[Path]:
    """Return the files that are models, or the first part of one, by name. Raises OSError."""
    return sorted(file for file in folder.iterdir() if file.suffix.lower() == _SUFFIX and _is_model(file.stem))


def title_of(file: Path) -> str:
    """Return a file's name without its suffix, and without the number of a part."""
    return _PART.sub("", file.stem)


def _is_model(stem: str) -> bool:
    """Whether a file is a whole model or the first part of one, and no projector."""
    part = _PART.search(stem)
    return _PROJECTOR.search(stem) is None and (part is None or int(part[1]) == 1)
