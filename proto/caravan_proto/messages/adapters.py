"""LoRA adapters that a router has its shards load, and the keys by which sequences name them."""

import hashlib
import math
import re
from dataclasses import dataclass

_NAME = re.compile(r"[^\s=]{1,128}")
_MAX_SCALE = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterSource:
    """``path``: of a GGUF file, as the shard sees it. The effect is multiplied by ``scale``."""

    name: str
    path: str
    scale: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedAdapter:
    """An adapter that a shard has loaded. ``size_bytes``: of its file."""

    key: str
    size_bytes: int


def is_adapter_name(name: str) -> bool:
    """Whether an adapter can have this name: 1 to 128 characters that are neither blank nor ``=``."""
    return _NAME.fullmatch(name) is not None


def adapter_key(source: AdapterSource, sha256: str) -> str:
    """Return what stands for an adapter wherever cells are told apart: its name, all bytes of its file, its scale.

    The name of an adapter of --lora is its key: its file and scale are part of the model, and stay. No name has a
    blank, so no key of the one kind is one of the other. ``sha256``: of the file.
    """
    # 0.0 and -0.0 are one scale.
    digest = hashlib.sha256(f"{sha256}\n{source.scale + 0.0!r}".encode()).hexdigest()
    return f"{source.name} {digest[:32]}"


def adapter_name(key: str) -> str:
    """Return the name of the adapter that has this key; "" for none."""
    return key.partition(" ")[0]


def is_loaded_key(key: str) -> bool:
    """Whether the adapter with this key was loaded while the shards ran."""
    return " " in key


def source_problem(source: AdapterSource) -> str:
    """Return what is wrong with a name, path or scale; "" if nothing is."""
    if not is_adapter_name(source.name):
        return f"lora_name must have 1 to 128 characters that are neither blank nor `=`. Given: {source.name[:128]!r}"
    if not source.path or "\0" in source.path:
        return f"lora_path must be the path of a file. Given: {source.path[:128]!r}"
    if not math.isfinite(source.scale) or abs(source.scale) > _MAX_SCALE:
        return f"scale must be from -{_MAX_SCALE} to {_MAX_SCALE}. Given: {source.scale:g}"
    return ""
