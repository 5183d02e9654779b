"""Writes models with random weights, as fast as the disk takes them."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from bench.models import add_tokenizer
from gguf import GGMLQuantizationType, GGUFWriter
from gpu.kit.random_weights import RandomWeights
from gpu.kit.shapes import ModelShape
from numpy.typing import NDArray

# The standard deviation of a step's logits: peaked, as those of most steps of a real model are, so that ties are rare.
_LOGIT_SPREAD = 8.0
_EPSILON = 1e-5


@dataclass(frozen=True, slots=True)
class _Tensor:
    """``kind``: F32 is drawn, or 1 if it has a single dimension; all others are blocks."""

    name: str
    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    spread: float = 1.0


def write_model(path: Path, shape: ModelShape, vocabulary: Path) -> Path:
    """Write a model with the tokenizer of ``vocabulary``, the same one every time; return ``path``.

    It holds one tensor at a time in memory.
    """
    unfinished = path.with_suffix(".unfinished")
    writer = GGUFWriter(unfinished, shape.architecture)
    _add_sizes(writer, shape)
    add_tokenizer(writer, vocabulary, shape.tokens)
    tensors = tuple(_tensors(shape))
    made = _Maker()
    for tensor in tensors:
        rows = made.row_shape(tensor)
        writer.add_tensor_info(
            tensor.name,
            rows,
            np.dtype(np.float32 if tensor.kind is GGMLQuantizationType.F32 else np.uint8),
            int(np.prod(rows)) * (4 if tensor.kind is GGMLQuantizationType.F32 else 1),
            raw_dtype=tensor.kind,
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for tensor in tensors:
        writer.write_tensor_data(made.data(tensor))
    writer.close()
    return unfinished.rename(path)


def _add_sizes(writer: GGUFWriter, shape: ModelShape) -> None:
    writer.add_context_length(shape.context)
    writer.add_embedding_length(shape.embedding)
    writer.add_feed_forward_length(shape.inner)
    writer.add_block_count(shape.layers)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head)
    writer.add_value_length(shape.head)
    writer.add_rope_dimension_count(shape.head)
    writer.add_rope_freq_base(shape.rope_base)
    writer.add_layer_norm_rms_eps(_EPSILON)
    writer.add_vocab_size(shape.tokens)
    if shape.experts is not None:
        writer.add_expert_count(shape.experts.count)
        writer.add_expert_used_count(shape.experts.used)
        writer.add_expert_feed_forward_length(shape.experts.inner)


def _tensors(shape: ModelShape) -> Iterator[_Tensor]:
    norm, most, finer = GGMLQuantizationType.F32, shape.most, shape.finer
    width, queries, keys = shape.embedding, shape.heads * shape.head, shape.kv_heads * shape.head
    yield _Tensor("token_embd.weight", (shape.tokens, width), most)
    yield _Tensor("output_norm.weight", (width,), norm)
    yield _Tensor("output.weight", (shape.tokens, width), finer, _LOGIT_SPREAD)
    for layer in range(shape.layers):
        block = f"blk.{layer}"
        yield _Tensor(f"{block}.attn_norm.weight", (width,), norm)
        yield _Tensor(f"{block}.attn_q.weight", (queries, width), most)
        yield _Tensor(f"{block}.attn_k.weight", (keys, width), most)
        yield _Tensor(f"{block}.attn_v.weight", (keys, width), finer)
        yield _Tensor(f"{block}.attn_output.weight", (width, queries), most)
        if shape.architecture == "qwen3moe":
            yield _Tensor(f"{block}.attn_q_norm.weight", (shape.head,), norm)
            yield _Tensor(f"{block}.attn_k_norm.weight", (shape.head,), norm)
        yield _Tensor(f"{block}.ffn_norm.weight", (width,), norm)
        if (experts := shape.experts) is not None:
            yield _Tensor(f"{block}.ffn_gate_inp.weight", (experts.count, width), norm)
            yield _Tensor(f"{block}.ffn_gate_exps.weight", (experts.count, experts.inner, width), most)
            yield _Tensor(f"{block}.ffn_up_exps.weight", (experts.count, experts.inner, width), most)
            yield _Tensor(f"{block}.ffn_down_exps.weight", (experts.count, width, experts.inner), most)
        else:
            yield _Tensor(f"{block}.ffn_gate.weight", (shape.inner, width), most)
            yield _Tensor(f"{block}.ffn_up.weight", (shape.inner, width), most)
            yield _Tensor(f"{block}.ffn_down.weight", (width, shape.inner), finer)


class _Maker:
    """Draws tensors. A product with a vector of ones has the length 1 in each dimension, times the tensor's spread."""

    def __init__(self) -> None:
        self._blocks: dict[tuple[GGMLQuantizationType, float], RandomWeights] = {}
        self._random = np.random.default_rng(7)

    def row_shape(self, tensor: _Tensor) -> tuple[int, ...]:
        if tensor.kind is GGMLQuantizationType.F32:
            return tensor.shape
        return (*tensor.shape[:-1], self._weights(tensor).row_bytes(tensor.shape[-1]))

    def data(self, tensor: _Tensor) -> NDArray[np.generic]:
        if tensor.kind is not GGMLQuantizationType.F32:
            return self._weights(tensor).matrix(*tensor.shape)
        if len(tensor.shape) == 1:
            return np.ones(tensor.shape, np.float32)
        drawn = self._random.standard_normal(tensor.shape, np.float32)
        return drawn * np.float32(self._spread(tensor))

    def _weights(self, tensor: _Tensor) -> RandomWeights:
        key = (tensor.kind, self._spread(tensor))
        if key not in self._blocks:
            self._blocks[key] = RandomWeights(*key, seed=len(self._blocks))
        return self._blocks[key]

    def _spread(self, tensor: _Tensor) -> float:
        return tensor.spread / math.sqrt(tensor.shape[-1])
