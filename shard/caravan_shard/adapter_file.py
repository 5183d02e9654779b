"""A LoRA adapter that the model is loaded with, or that is loaded later."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class AdapterFile:
    """Its effect is multiplied by ``scale``."""

    name: str
    path: Path
    scale: float = 1.0
