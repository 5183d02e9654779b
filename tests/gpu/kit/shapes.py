"""The models that the kit makes: the shapes of known ones, and small ones of the same kinds for a rehearsal."""

from dataclasses import dataclass, replace

from gguf import GGMLQuantizationType


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
