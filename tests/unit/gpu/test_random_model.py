"""The models that the kit makes: whole, of the sizes that they should have."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFReader
from gguf.quants import dequantize
from gpu.kit.models import DENSE, MIXTURE, SHAPES, ModelShape, RandomWeights, small, write_model

from caravan_testing.shard_tiny_llama import write_tiny_llama

KINDS = (GGMLQuantizationType.Q4_0, GGMLQuantizationType.Q8_0, GGMLQuantizationType.Q4_K, GGMLQuantizationType.Q6_K)
TOKENS = 512


def _written(folder: Path, shape: ModelShape) -> Path:
    shape = replace(small(shape), tokens=TOKENS)
    return write_model(folder / "model.gguf", shape, write_tiny_llama(folder / "vocabulary.gguf"))


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("columns", [512, 14_336])
def test_weights_have_the_spread_that_was_asked_for(kind: GGMLQuantizationType, columns: int) -> None:
    spread = columns**-0.5
    weights = dequantize(RandomWeights(kind, spread, seed=3).matrix(64, columns), kind)
    assert weights.shape == (64, columns)
    assert np.isfinite(weights).all()
    assert weights.std() == pytest.approx(spread, rel=0.05)
    # Otherwise a vector whose mean is not 0 would grow by the number of columns.
    assert abs(weights.mean()) < 0.15 * spread


def test_tensors_of_one_shape_differ_and_return_with_their_seed() -> None:
    kind = GGMLQuantizationType.Q4_K
    drawn = RandomWeights(kind, 1.0, seed=3)
    first, second = drawn.matrix(8, 256), drawn.matrix(8, 256)
    assert not np.array_equal(first, second)
    assert np.array_equal(RandomWeights(kind, 1.0, seed=3).matrix(8, 256), first)


def test_a_tensor_may_be_larger_than_what_is_drawn_once() -> None:
    matrix = RandomWeights(GGMLQuantizationType.Q8_0, 1.0, seed=3).matrix(40, 1024, 1024)
    assert matrix.shape == (40, 1024, 1024 // 32 * 34)
    assert np.isfinite(dequantize(matrix[-1, -1:], GGMLQuantizationType.Q8_0)).all()


@pytest.mark.parametrize(("name", "billions", "active"), [("8b", 8.0, 8.0), ("30b-a3b", 30.5, 3.3)])
def test_shapes_have_the_weights_of_their_names(name: str, billions: float, active: float) -> None:
    shape = SHAPES[name]
    attention = shape.embedding * shape.head * (2 * shape.heads + 2 * shape.kv_heads)
    expert = 3 * shape.embedding * (shape.inner if shape.experts is None else shape.experts.inner)
    count, used = (1, 1) if shape.experts is None else (shape.experts.count, shape.experts.used)
    ends = 2 * shape.tokens * shape.embedding
    assert (shape.layers * (attention + count * expert) + ends) / 1e9 == pytest.approx(billions, rel=0.02)
    assert (shape.layers * (attention + used * expert) + ends) / 1e9 == pytest.approx(active, rel=0.03)


@pytest.mark.parametrize(("shape", "layer"), [(DENSE, 9), (MIXTURE, 12)], ids=["dense", "experts"])
def test_a_written_model_has_its_tensors_in_their_types(shape: ModelShape, layer: int, tmp_path: Path) -> None:
    reader = GGUFReader(_written(tmp_path, shape))
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    assert len(tensors) == 3 + layer * small(shape).layers
    assert tensors["blk.1.attn_q.weight"].tensor_type is GGMLQuantizationType.Q4_K
    assert tensors["output.weight"].tensor_type is GGMLQuantizationType.Q6_K
    assert len(reader.fields["tokenizer.ggml.tokens"].contents()) == TOKENS
    assert not (tmp_path / "model.unfinished").exists()
