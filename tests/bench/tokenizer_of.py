"""Gives a model that is written the tokenizer of another one, for as many tokens as it is to have."""

from pathlib import Path
from typing import Any

from gguf import GGUFReader, GGUFValueType, GGUFWriter

_NORMAL = 1


def add_tokenizer(writer: GGUFWriter, source: Path, tokens: int | None = None) -> None:
    """Add the tokenizer of the GGUF file ``source``, filled up to ``tokens`` with tokens that no text has."""
    for key, found in GGUFReader(source).fields.items():
        if key.startswith("tokenizer."):
            is_list = found.types[0] is GGUFValueType.ARRAY
            value = found.contents()
            if is_list and tokens is not None:
                value = _filled(key, value, tokens)
            writer.add_key_value(key, value, found.types[0], found.types[-1] if is_list else None)


def _filled(key: str, values: list[Any], tokens: int) -> list[Any]:
    """Return ``values`` with an entry for each token, if the list has entries for tokens."""
    missing = range(len(values), tokens)
    match key.removeprefix("tokenizer.ggml."):
        case "tokens":
            return [*values, *(f"unused{token}" for token in missing)]
        case "scores":
            return [*values, *(-1e6 for _ in missing)]
        case "token_type":
            return [*values, *(_NORMAL for _ in missing)]
        case _:
            return values
