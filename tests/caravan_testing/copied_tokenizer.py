"""Gives a model that a test writes the tokenizer and the chat template of a real one."""

from pathlib import Path

from gguf import GGUFReader, GGUFValueType, GGUFWriter


def copy_tokenizer(source: Path, writer: GGUFWriter) -> int:
    """Add what the GGUF file ``source`` says of its tokenizer to ``writer``. Return the number of tokens."""
    tokens = 0
    for key, found in GGUFReader(source).fields.items():
        if key.startswith("tokenizer."):
            is_list = found.types[0] is GGUFValueType.ARRAY
            writer.add_key_value(key, found.contents(), found.types[0], found.types[-1] if is_list else None)
            tokens = len(found.data) if key == "tokenizer.ggml.tokens" else tokens
    return tokens
