"""Reads the metadata of a loaded GGUF file. llama.cpp returns each value as text, without its type, and no arrays."""

import ctypes
import re
from typing import Any

import llama_cpp

from caravan_proto.messages.model import MetadataValue

# Longer texts are left out: they are templates and licenses, not facts.
_ROOM = 1024
_NUMBER = re.compile(r"-?[0-9]+")
_FLAGS = {"true": True, "false": False}
_FLOAT = re.compile(r"-?[0-9]+\.[0-9]+")
# The numbers among the keys of every file; its other ones are texts, even "2" of `general.version`.
_GENERAL_NUMBERS = re.compile(r"general\.(alignment|file_type|quantization_version|.*\.count)")


def metadata_text(model: Any, key: str) -> str:
    """Return a value of the file's metadata as text; empty if the file has none, or a long one."""
    buffer = ctypes.create_string_buffer(_ROOM)
    length = llama_cpp.llama_model_meta_val_str(model, key.encode(), buffer, _ROOM)
    return buffer.value.decode(errors="replace") if 0 <= length < _ROOM else ""


def all_metadata(model: Any) -> tuple[tuple[str, MetadataValue], ...]:
    """Return the texts, whole numbers and flags of the file's metadata by key.

    Fractions are left out, since llama.cpp rounds them to six decimals.
    """
    found = []
    buffer = ctypes.create_string_buffer(_ROOM)
    for index in range(llama_cpp.llama_model_meta_count(model)):
        length = llama_cpp.llama_model_meta_key_by_index(model, index, buffer, _ROOM)
        key = buffer.value.decode(errors="replace")
        if 0 <= length < _ROOM:
            length = llama_cpp.llama_model_meta_val_str_by_index(model, index, buffer, _ROOM)
            text = buffer.value.decode(errors="replace")
            if 0 <= length < _ROOM and (value := typed(key, text)) is not None:
                found.append((key, value))
    return tuple(sorted(found))


def typed(key: str, text: str) -> MetadataValue | None:
    """Return a value of the type that ``key`` has in GGUF files; None for a fraction, or a number of over 63 bits."""
    if key.startswith("general.") and not _GENERAL_NUMBERS.fullmatch(key):
        # `general.sampling` has numbers of both kinds.
        return None if key.startswith("general.sampling.") else text
    if _NUMBER.fullmatch(text):
        number = int(text)
        return number if -(2**63) <= number < 2**63 else None
    if _FLOAT.fullmatch(text):
        return None
    return _FLAGS.get(text, text)
