"""Makes the models."""

import math
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

import numpy as np
from bench.models import add_tokenizer
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter
from gguf.quants import dequantize
from gpu.kit.job import MODELS, VOCABULARY, Job, keep, run_stage
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """A mixture of experts, in the place of each layer's feed-forward network."""

    count: int
    used: int
    inner: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Sizes of a model. Its matrices are of type ``most``; the last one, and those that add much, are ``finer``."""

    architecture: str
    layers: int
    embedding: int
    heads: int
    kv_heads: int
    head: int
    inner: int
    tokens: int
    context: int = 32_768
    rope_base: float = 500_000.0
    most: GGMLQuantizationType = GGMLQuantizationType.Q4_K
    finer: GGMLQuantizationType = GGMLQuantizationType.Q6_K
    experts: Experts | None = None


# Of SmolLM2-135M, for the tests. Its rows are no whole blocks of K-quants.
DEMO = ModelShape(
    architecture="llama",
    layers=30,
    embedding=576,
    heads=9,
    kv_heads=3,
    head=64,
    inner=1536,
    tokens=49_152,
    context=8192,
    most=GGMLQuantizationType.Q4_0,
    finer=GGMLQuantizationType.Q8_0,
)
# Of Llama 3 8B: 4.9 GB.
DENSE = ModelShape(
    architecture="llama",
    layers=32,
    embedding=4096,
    heads=32,
    kv_heads=8,
    head=128,
    inner=14_336,
    tokens=128_256,
)
# Of Qwen3 30B-A3B: 17.5 GB, of which a token reads 1.9.
MIXTURE = ModelShape(
    architecture="qwen3moe",
    layers=48,
    embedding=2048,
    heads=32,
    kv_heads=4,
    head=128,
    inner=6144,
    tokens=151_936,
    rope_base=1_000_000.0,
    experts=Experts(count=128, used=8, inner=768),
)
SHAPES = {"demo": DEMO, "8b": DENSE, "30b-a3b": MIXTURE}


def small(shape: ModelShape) -> ModelShape:
    """Return a model of the same kind that a CPU computes in a millisecond or two."""
    experts = None if shape.experts is None else Experts(count=8, used=2, inner=256)
    return replace(
        shape, layers=2, embedding=256, heads=4, kv_heads=2, head=64, inner=512, tokens=49_152, experts=experts
    )


Bytes: TypeAlias = NDArray[np.uint8]

# What is drawn once; tensors are made of its repetitions, each from a place of its own.
_POOL_BYTES = 32 << 20
_SAMPLE_BLOCKS = 4096


@dataclass(frozen=True, slots=True)
class _Factor:
    """A factor of 16 bits at a byte of each block, ``times`` the block's scale."""

    at: int
    times: float = 1.0


# All other bytes of a block may have any value. With these factors, the mean of the weights is 0 or next to it: Q4_K
# has a minimum, of which a block subtracts as much as its values have in the mean.
_FACTORS = {
    GGMLQuantizationType.Q4_0: (_Factor(0),),
    GGMLQuantizationType.Q8_0: (_Factor(0),),
    GGMLQuantizationType.Q4_K: (_Factor(0), _Factor(2, 7.5)),
    GGMLQuantizationType.Q6_K: (_Factor(208),),
}


class RandomWeights:
    """Blocks of one type, whose weights have a standard deviation of ``spread``. The same seed draws the same ones."""

    def __init__(self, kind: GGMLQuantizationType, spread: float, seed: int) -> None:
        self._kind = kind
        self._block_weights, self._block_bytes = GGML_QUANT_SIZES[kind]
        self._random = np.random.default_rng(seed)
        self._pool = self._drawn(spread)

    def row_bytes(self, columns: int) -> int:
        """Return the bytes of a row of ``columns`` weights."""
        assert columns % self._block_weights == 0, f"{columns} columns are no whole blocks of {self._kind.name}"
        return columns // self._block_weights * self._block_bytes

    def matrix(self, *shape: int) -> Bytes:
        """Return the bytes of a tensor whose rows have ``shape[-1]`` weights."""
        rows = (*shape[:-1], self.row_bytes(shape[-1]))
        data = np.empty(int(np.prod(rows)), np.uint8)
        flat = self._pool.reshape(-1)
        place, at = 0, int(self._random.integers(len(self._pool))) * self._block_bytes
        while place < len(data):
            part = flat[at : at + len(data) - place]
            data[place : place + len(part)] = part
            place, at = place + len(part), 0
        return data.reshape(rows)

    def _drawn(self, spread: float) -> Bytes:
        blocks = _POOL_BYTES // self._block_bytes
        pool = np.frombuffer(self._random.bytes(blocks * self._block_bytes), np.uint8).copy()
        pool = pool.reshape(blocks, self._block_bytes)
        self._scale(pool, 1.0)
        unscaled = float(dequantize(pool[:_SAMPLE_BLOCKS], self._kind).std())
        self._scale(pool, spread / unscaled)
        return pool

    def _scale(self, pool: Bytes, scale: float) -> None:
        for factor in _FACTORS[self._kind]:
            pool[:, factor.at : factor.at + 2] = np.array([scale * factor.times], np.float16).view(np.uint8)


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


# For the tests; all others are measured.
FOR_TESTS = "demo"
MEASURED = tuple(name for name in SHAPES if name != FOR_TESTS)


def model_file(name: str) -> Path:
    """Return the file of a model in `SHAPES`, which this stage makes."""
    return MODELS / f"{name}.gguf"


def run(job: Job) -> None:
    """Write those that are missing."""
    MODELS.mkdir(parents=True, exist_ok=True)
    for name, shape in SHAPES.items():
        path = model_file(name)
        if path.is_file():
            continue
        job.need(30)
        started = time.monotonic()
        write_model(path, small(shape) if job.rehearsal else shape, VOCABULARY)
        seconds, gigabytes = time.monotonic() - started, path.stat().st_size / 1e9
        print(f"{path.name}: {gigabytes:.2f} GB in {seconds:.0f} s", flush=True)
        keep("models", name, {"gigabytes": round(gigabytes, 2), "seconds": round(seconds, 1)})


if __name__ == "__main__":
    sys.exit(run_stage(run))
