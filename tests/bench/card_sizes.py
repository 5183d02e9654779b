"""What fits in a card, by what a shard itself would choose: the table of docs/sizing.md.

    PYTHONPATH=tests .venv/bin/python -m bench.card_sizes

Each model is a GGUF file with the tensors of its class, whose weights are a hole in the file: a shard that only
measures reads none of them. An rpc-server of llama.cpp stands in for the card, and is said to have its memory free. It
needs no GPU. The kernels of a GPU may want other compute buffers, by some hundred MiB.
"""

import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter

from caravan_shard.backends.llama.devices.devices import Device, first_devices
from caravan_shard.backends.llama.devices.plan import LoadPlan, plan_load
from caravan_shard.backends.llama.model.log import route_llama_log
from caravan_shard.config import ShardConfig
from caravan_shard.memory_need import HOST
from caravan_testing.rpc_process import RpcServer

GIB = 1 << 30
CARDS_GIB = (8, 16, 24, 80)
CONTEXT = 131_072
Q = GGMLQuantizationType


@dataclass(frozen=True)
class Shape:
    """A class of models. ``inner``: width of a feed-forward block, or of each of ``experts``."""

    name: str
    layers: int
    width: int
    inner: int
    heads: int
    kv_heads: int
    head: int
    vocabulary: int
    experts: int = 0

    @property
    def parameters(self) -> int:
        return sum(int(np.prod(shape)) for _, shape in self.tensors())

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield names and shapes, rows first."""
        yield "token_embd.weight", (self.vocabulary, self.width)
        yield "output.weight", (self.vocabulary, self.width)
        yield "output_norm.weight", (self.width,)
        for layer in range(self.layers):
            for norm in ("attn_norm", "ffn_norm"):
                yield f"blk.{layer}.{norm}.weight", (self.width,)
            yield f"blk.{layer}.attn_q.weight", (self.heads * self.head, self.width)
            yield f"blk.{layer}.attn_k.weight", (self.kv_heads * self.head, self.width)
            yield f"blk.{layer}.attn_v.weight", (self.kv_heads * self.head, self.width)
            yield f"blk.{layer}.attn_output.weight", (self.width, self.heads * self.head)
            suffix, count = ("_exps", (self.experts,)) if self.experts else ("", ())
            if self.experts:
                yield f"blk.{layer}.ffn_gate_inp.weight", (self.experts, self.width)
            yield f"blk.{layer}.ffn_gate{suffix}.weight", (*count, self.inner, self.width)
            yield f"blk.{layer}.ffn_up{suffix}.weight", (*count, self.inner, self.width)
            yield f"blk.{layer}.ffn_down{suffix}.weight", (*count, self.width, self.inner)


SHAPES = (
    Shape("3 billion", 28, 3072, 8192, 24, 8, 128, 128_256),
    Shape("8 billion", 32, 4096, 14_336, 32, 8, 128, 128_256),
    Shape("14 billion", 40, 5120, 17_408, 40, 8, 128, 151_936),
    Shape("32 billion", 64, 5120, 25_600, 64, 8, 128, 151_936),
    Shape("70 billion", 80, 8192, 28_672, 64, 8, 128, 128_256),
    Shape("30 billion, 128 experts", 48, 2048, 768, 32, 4, 128, 151_936, experts=128),
)


def q4_k_m(name: str, layer: int, layers: int) -> GGMLQuantizationType:
    """Return what llama.cpp's quantizer chooses for Q4_K_M (``llama-quant.cpp``, ``use_more_bits``)."""
    more = layer < layers // 8 or layer >= 7 * layers // 8 or (layer - layers // 8) % 3 == 2
    if name == "output.weight" or (more and ("attn_v." in name or "ffn_down" in name)):
        return Q.Q6_K
    return Q.Q4_K


def write_hollow(path: Path, shape: Shape, kind: str) -> Path:
    """Write a GGUF whose weights are a hole. ``kind``: Q4_K_M, or a type for all."""
    writer = GGUFWriter(path, "llama")
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(shape.width)
    writer.add_feed_forward_length(shape.inner)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head)
    writer.add_value_length(shape.head)
    writer.add_block_count(shape.layers)
    writer.add_rope_dimension_count(shape.head)
    writer.add_layer_norm_rms_eps(1e-5)
    if shape.experts:
        writer.add_expert_count(shape.experts)
        writer.add_expert_used_count(8)
    writer.add_tokenizer_model("llama")
    writer.add_token_list([f"<{number}>" for number in range(shape.vocabulary)])
    writer.add_token_scores([0.0] * shape.vocabulary)
    writer.add_token_types([1] * shape.vocabulary)
    total = 0
    for name, dimensions in shape.tensors():
        layer = int(name.split(".")[1]) if name.startswith("blk.") else 0
        of_all = q4_k_m(name, layer, shape.layers) if kind == "Q4_K_M" else Q.__members__[kind]
        dtype = Q.F32 if len(dimensions) == 1 or "gate_inp" in name else of_all
        elements, size = GGML_QUANT_SIZES[dtype]
        length = int(np.prod(dimensions)) // elements * size
        writer.add_tensor_info(name, dimensions, np.dtype(np.float32), length, raw_dtype=dtype)
        total += -(-length // 32) * 32
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    with path.open("r+b") as file:
        file.truncate(-(-path.stat().st_size // 32) * 32 + total)
    return path


def described(plan: LoadPlan) -> str:
    """Return what of the model lies on the card."""
    if plan.gpu_layers == 0:
        return "nothing"
    if plan.gpu_layers < plan.layers:
        beside = ", no experts" if plan.experts_on_host else ""
        return f"{plan.gpu_layers} of {plan.layers} layers{beside}"
    cells = f"{plan.measured.cells:,} cells"
    if plan.experts_on_host:
        layers = plan.layers - 1
        return f"experts of {layers - plan.experts_on_host} of {layers} layers, {cells}"
    return cells


def row(folder: Path, device: Device, shape: Shape, kind: str) -> list[str]:
    """Return a row of the table."""
    path = write_hollow(folder / f"{shape.layers}-{shape.width}-{kind}.gguf", shape, kind)
    config = ShardConfig(model=str(path), flash_attn="on")
    found = [plan_load(config, [replace(device, free_bytes=size * GIB)]) for size in CARDS_GIB]
    need = plan_load(replace(config, ctx_size=8192, fit=False), [replace(device, free_bytes=0)]).measured.need
    assert need is not None
    parts = need.by_place
    weights = sum(kinds.get("weights", 0) for place, kinds in parts.items() if place != HOST)
    cell = sum(kinds.get("cells", 0) for kinds in parts.values()) // 8192
    path.unlink()
    sizes = [f"{weights / GIB:.1f}", f"{cell / 1024:.0f}"]
    return [f"{shape.name} ({shape.parameters / 1e9:.1f})", kind, *sizes, *map(described, found)]


def main() -> None:
    """Print the table, a row at a time."""
    server = RpcServer()
    try:
        route_llama_log()
        (device,) = first_devices([server.address])
        print("| parameters (billions) | file | weights, GiB | KiB for a cell |", end="")
        print("".join(f" {size} GiB |" for size in CARDS_GIB))
        print("| --- " * (4 + len(CARDS_GIB)) + "|")
        with tempfile.TemporaryDirectory() as folder:
            for shape in SHAPES:
                for kind in ("Q4_K_M", "Q8_0"):
                    print(f"| {' | '.join(row(Path(folder), device, shape, kind))} |")
                    sys.stdout.flush()
    finally:
        server.kill()


if __name__ == "__main__":
    main()
