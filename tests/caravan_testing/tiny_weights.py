"""Random weights of the models that tests make, and how these get into a file."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFWriter
from numpy.typing import NDArray

from caravan_testing.gguf_file import fields_of

Weights = NDArray[np.floating[Any]]


class RandomWeights:
    """Draws weights, the same ones every time."""

    def __init__(self, seed: int) -> None:
        self._random = np.random.default_rng(seed)

    def __call__(self, *shape: int, scale: float = 1.0) -> Weights:
        """Return a matrix that keeps the length of what it is multiplied with, times ``scale``, on average."""
        numbers: NDArray[np.float64] = scale * self._random.standard_normal(shape) / np.sqrt(shape[-1])
        return numbers


def write_weights(writer: GGUFWriter, tensors: Mapping[str, Weights]) -> None:
    """Add the tensors in 32 bits, write the file and close it."""
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor.astype(np.float32))
    finish(writer)


def finish(writer: GGUFWriter) -> None:
    """Write the file with the tensors that were added, and close it."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def copy_tokenizer(source: Path, writer: GGUFWriter, first: int | None = None) -> int:
    """Add what the GGUF file ``source`` says of its tokenizer to ``writer``. Return the number of tokens.

    ``first``: so many tokens of a BPE, and the merges that make one of them.
    """
    fields = fields_of(source)
    tokens = fields["tokenizer.ggml.tokens"].value[:first]
    kept = set(tokens)
    for key, (value, kind, of_items) in fields.items():
        if first is not None and of_items is not None:
            is_merges = key == "tokenizer.ggml.merges"
            value = [one for one in value if one.replace(" ", "") in kept] if is_merges else value[:first]
        if key.startswith("tokenizer."):
            writer.add_key_value(key, value, kind, of_items)
    return len(tokens)


def write_first_tokens(path: Path, source: Path, count: int) -> Path:
    """Write a GGUF file without tensors with the first ``count`` tokens of ``source``."""
    writer = GGUFWriter(path, "llama")
    copy_tokenizer(source, writer, count)
    finish(writer)
    return path
