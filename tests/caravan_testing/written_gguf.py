"""Writes the parts of a model's file that are looked at before it is loaded."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf

from caravan_testing.tiny_weights import finish

TOKENS = 20


def written(
    path: Path, architecture: str, numbers: Mapping[str, Any], tensors: Mapping[str, Any], tokens: int = TOKENS
) -> Path:
    """Write the parts of a file that are looked at. Numbers and tensors that are None are left out."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_token_list([f"t{number}" for number in range(tokens)])
    for key, value in numbers.items():
        name = key if key.startswith("tokenizer.") else f"{architecture}.{key}"
        if isinstance(value, list):
            writer.add_array(name, value)
        elif isinstance(value, bool):
            writer.add_bool(name, value)
        elif value is not None:
            writer.add_uint32(name, value)
    for name, tensor in tensors.items():
        if tensor is not None:
            writer.add_tensor(name, tensor)
    finish(writer)
    return path
