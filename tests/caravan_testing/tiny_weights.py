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


def copy_tokenizer(source: Path, writer: GGUFWriter) -> int:
    """Add what the GGUF file ``source`` says of its tokenizer to ``writer``. Return the number of tokens."""
    tokens = 0
    for key, (value, kind, of_items) in fields_of(source).items():
        if key.startswith("tokenizer."):
            writer.add_key_value(key, value, kind, of_items)
            tokens = len(value) if key == "tokenizer.ggml.tokens" else tokens
    return tokens


def write_first_tokens(path: Path, source: Path, count: int) -> Path:
    """Write a GGUF file without tensors with the tokenizer of ``source``, a BPE, cut to its first ``count`` tokens."""
    writer = GGUFWriter(path, "llama")
    fields = fields_of(source)
    kept = set(fields["tokenizer.ggml.tokens"].value[:count])
    for key, (value, kind, of_items) in fields.items():
        if key == "tokenizer.ggml.merges":
            value = [merge for merge in value if merge.replace(" ", "") in kept]
        elif key.startswith("tokenizer.") and of_items is not None:
            value = value[:count]
        if key.startswith("tokenizer."):
            writer.add_key_value(key, value, kind, of_items)
    finish(writer)
    return path
