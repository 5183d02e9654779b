"""The value of --lora: an adapter's name, its file and its scale."""

import re
from dataclasses import dataclass
from pathlib import Path

_SCALED = re.compile(r"(.+):(-?\d+(?:\.\d+)?)")
_NAME = re.compile(r"[^\s=]{1,128}")


@dataclass(frozen=True, slots=True)
class AdapterFile:
    """A LoRA adapter. Its effect is multiplied by ``scale``."""

    name: str
    path: Path
    scale: float = 1.0


def parse_adapter(text: str) -> AdapterFile:
    """Parse ``[NAME=]PATH[:SCALE]``. The default name is the file's, without its suffix. Raises ValueError."""
    name, separator, rest = text.partition("=")
    if not separator:
        name, rest = "", text
    scaled = _SCALED.fullmatch(rest)
    path = Path(scaled[1] if scaled else rest)
    if not separator:
        name = path.stem
    if not path.name or not _NAME.fullmatch(name):
        raise ValueError(
            "lora must be PATH, NAME=PATH or NAME=PATH:SCALE, with a name of 1 to 128 characters that are not blank. "
            f"Given: {text!r}"
        )
    return AdapterFile(name, path, float(scaled[2]) if scaled else 1.0)
