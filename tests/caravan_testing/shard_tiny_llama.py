"""Writes a llama with random weights, and records what Hugging Face's ``generate`` finds with the same weights.

The record needs torch and transformers, which the tests do not. To make it again:

    PYTHONPATH=tests python tests/caravan_testing/shard_tiny_llama.py > tests/e2e/beams_of_tiny_llama.json
"""

import itertools
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFType, GGUFWriter, Keys
from numpy.typing import NDArray

from caravan_testing.shard_tiny_mamba import TOKENS, TYPES
from caravan_testing.tiny_weights import RandomWeights, Weights, copy_tokenizer, write_weights

CONTEXT, EPSILON = 512, 1e-5


@dataclass(frozen=True)
class Shape:
    """Numbers of dimensions, layers, heads, dimensions inside of a layer, and tokens that it was made for."""

    embedding: int = 64
    layers: int = 2
    heads: int = 4
    inner: int = 128
    context: int = CONTEXT


_TINY = Shape()
# Among the likely tokens, so that some outputs end early.
END_TOKEN_IDS = (2, *range(60, 84))


@dataclass(frozen=True)
class Parts:
    """How the tensors of a model are spread over files: so many in each, maybe none in the first."""

    tensors: int
    first_is_small: bool = False


def write_tiny_llama(
    path: Path,
    shape: Shape = _TINY,
    tokenizer_of: Path | None = None,
    parts: Parts | None = None,
    broken: Mapping[int, float] | None = None,
) -> Path:
    """Write a GGUF with a vocabulary of bytes, or with the tokenizer and template of another; always the same.

    It has half a megabyte if nothing is given. ``broken``: tokens of which all weights have another value. Return the
    path of the file, or of its first part.
    """
    splitting: dict[str, Any] = {}
    if parts is not None:
        splitting = {"split_max_tensors": parts.tensors, "small_first_shard": parts.first_is_small}
    writer = GGUFWriter(path, "llama", **splitting)
    writer.add_context_length(shape.context)
    writer.add_embedding_length(shape.embedding)
    writer.add_feed_forward_length(shape.inner)
    writer.add_head_count(shape.heads)
    writer.add_block_count(shape.layers)
    writer.add_rope_dimension_count(shape.embedding // shape.heads)
    writer.add_layer_norm_rms_eps(EPSILON)
    if tokenizer_of is not None:
        tokens = copy_tokenizer(tokenizer_of, writer)
    else:
        tokens = len(TOKENS)
        writer.add_tokenizer_model("llama")
        writer.add_token_list(TOKENS)
        writer.add_token_scores([0.0] * tokens)
        writer.add_token_types(TYPES)
    tensors = _tensors(shape, tokens)
    for token, value in (broken or {}).items():
        tensors["token_embd.weight"][token] = value
    for name, tensor in tensors.items():
        # llama.cpp rotates neighbours; transformers rotates the halves of a head.
        is_rotated = name.endswith(("attn_q.weight", "attn_k.weight"))
        writer.add_tensor(name, _interleaved(tensor, shape.heads) if is_rotated else tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path if parts is None else min(path.parent.glob(f"{path.stem}-00001-of-*.gguf"))


def _interleaved(tensor: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    rows = tensor.reshape(heads, 2, -1, tensor.shape[1])
    return np.ascontiguousarray(rows.swapaxes(1, 2).reshape(tensor.shape))


def _tensors(shape: Shape, tokens: int) -> dict[str, NDArray[np.float32]]:
    """Return the weights by their names in GGUF, as transformers has them."""
    embedding, inner = shape.embedding, shape.inner
    random = np.random.default_rng(7)

    def weights(*shape: int, scale: float = 1.0) -> NDArray[np.float32]:
        drawn: NDArray[np.float64] = scale * random.standard_normal(shape) / np.sqrt(shape[-1])
        return drawn.astype(np.float32)

    tensors = {
        "token_embd.weight": weights(tokens, embedding, scale=8.0),
        "output_norm.weight": np.ones(embedding, np.float32),
        "output.weight": weights(tokens, embedding, scale=2.0),
    }
    for layer in range(shape.layers):
        block = {
            "attn_norm.weight": np.ones(embedding, np.float32),
            "attn_q.weight": weights(embedding, embedding),
            "attn_k.weight": weights(embedding, embedding),
            "attn_v.weight": weights(embedding, embedding, scale=2.0),
            "attn_output.weight": weights(embedding, embedding, scale=2.0),
            "ffn_norm.weight": np.ones(embedding, np.float32),
            "ffn_gate.weight": weights(inner, embedding),
            "ffn_up.weight": weights(inner, embedding),
            "ffn_down.weight": weights(embedding, inner),
        }
        tensors |= {f"blk.{layer}.{name}": tensor for name, tensor in block.items()}
    return tensors


_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def _model() -> Any:
    """Return the model of transformers."""
    torch, transformers = import_module("torch"), import_module("transformers")
    config = transformers.LlamaConfig(
        vocab_size=len(TOKENS),
        hidden_size=_TINY.embedding,
        intermediate_size=_TINY.inner,
        num_hidden_layers=_TINY.layers,
        num_attention_heads=_TINY.heads,
        max_position_embeddings=CONTEXT,
        rms_norm_eps=EPSILON,
        tie_word_embeddings=False,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    state = {}
    for name, tensor in _tensors(_TINY, len(TOKENS)).items():
        parts = name.removesuffix(".weight").split(".")
        layer = f"model.layers.{parts[1]}." if parts[0] == "blk" else ""
        state[f"{layer}{_NAMES[parts[-1]]}.weight"] = torch.from_numpy(tensor)
    model.load_state_dict(state)
    return model


def main() -> None:
    """Write the record as JSON."""
    torch, model = import_module("torch"), _model()
    cases = []
    for prompt, width, penalty, early in itertools.product(
        ((1, 72, 80), (1, 90, 100, 110, 120)), (2, 4), (0.0, 1.0, 2.0), (False, True, "never")
    ):
        output = model.generate(
            torch.tensor([prompt]),
            num_beams=width,
            num_return_sequences=width,
            max_new_tokens=12,
            length_penalty=penalty,
            early_stopping=early,
            do_sample=False,
            eos_token_id=list(END_TOKEN_IDS),
            pad_token_id=0,
            output_scores=True,
            return_dict_in_generate=True,
        )
        outputs = []
        for row in output.sequences[:, len(prompt) :].tolist():
            ends = [place for place, token in enumerate(row) if token in END_TOKEN_IDS]
            outputs.append(row[: ends[0] + 1] if ends else row)
        scores = [round(score, 4) for score in output.sequences_scores.tolist()]
        case = {"prompt": prompt, "width": width, "length_penalty": penalty, "early_stopping": early}
        cases.append(case | {"outputs": outputs, "scores": scores})
    json.dump({"transformers": import_module("transformers").__version__, "cases": cases}, sys.stdout)
    sys.stdout.write("\n")


LAYERS, EXPERTS, USED, HEADS, EMBEDDING, INNER = 6, 8, 2, 4, 64, 512
# The three matrices of all experts of a layer, in 32 bits.
LAYER_EXPERT_BYTES = 3 * EXPERTS * EMBEDDING * INNER * 4


def write_tiny_moe(path: Path) -> Path:
    """Write a GGUF with a vocabulary of bytes, the same one every time. Nearly all of its 19 MiB are experts."""
    writer = GGUFWriter(path, "llama")
    writer.add_context_length(4096)
    writer.add_embedding_length(EMBEDDING)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_block_count(LAYERS)
    writer.add_rope_dimension_count(EMBEDDING // HEADS)
    writer.add_layer_norm_rms_eps(EPSILON)
    writer.add_expert_count(EXPERTS)
    writer.add_expert_used_count(USED)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(TOKENS)
    writer.add_token_scores([0.0] * len(TOKENS))
    writer.add_token_types(TYPES)
    random = np.random.default_rng(11)

    def add(name: str, *shape: int) -> None:
        writer.add_tensor(name, (random.standard_normal(shape) / np.sqrt(shape[-1])).astype(np.float32))

    add("token_embd.weight", len(TOKENS), EMBEDDING)
    add("output.weight", len(TOKENS), EMBEDDING)
    writer.add_tensor("output_norm.weight", np.ones(EMBEDDING, np.float32))
    for layer in range(LAYERS):
        block = f"blk.{layer}"
        for norm in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"{block}.{norm}.weight", np.ones(EMBEDDING, np.float32))
        for matrix in ("attn_q", "attn_k", "attn_v", "attn_output"):
            add(f"{block}.{matrix}.weight", EMBEDDING, EMBEDDING)
        add(f"{block}.ffn_gate_inp.weight", EXPERTS, EMBEDDING)
        add(f"{block}.ffn_gate_exps.weight", EXPERTS, INNER, EMBEDDING)
        add(f"{block}.ffn_up_exps.weight", EXPERTS, INNER, EMBEDDING)
        add(f"{block}.ffn_down_exps.weight", EXPERTS, EMBEDDING, INNER)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


WINDOW = 64
_EMBEDDING, _LAYERS, _HEADS, _KV_HEADS, _FEED_FORWARD, _CONTEXT = 64, 4, 4, 2, 128, 8192
_HEAD = _EMBEDDING // _HEADS
# Layers of a window, one after another, and one that sees everything.
_PATTERN = 2


def write_tiny_window(path: Path, tokenizer_of: Path) -> Path:
    """Write a GGUF of the architecture gemma3, with the tokenizer and template of another; always the same."""
    writer = GGUFWriter(path, "gemma3")
    writer.add_context_length(_CONTEXT)
    writer.add_embedding_length(_EMBEDDING)
    writer.add_feed_forward_length(_FEED_FORWARD)
    writer.add_head_count(_HEADS)
    writer.add_head_count_kv(_KV_HEADS)
    writer.add_key_length(_HEAD)
    writer.add_value_length(_HEAD)
    writer.add_block_count(_LAYERS)
    writer.add_rope_dimension_count(_HEAD)
    writer.add_sliding_window(WINDOW)
    writer.add_sliding_window_pattern(_PATTERN)
    writer.add_layer_norm_rms_eps(1e-6)
    write_weights(writer, _tiny_window_tensors(copy_tokenizer(tokenizer_of, writer)))
    return path


def _tiny_window_tensors(tokens: int) -> dict[str, Weights]:
    drawn = RandomWeights(23)
    tensors = {
        "token_embd.weight": drawn(tokens, _EMBEDDING),
        "output.weight": drawn(tokens, _EMBEDDING, scale=8.0),
        "output_norm.weight": np.ones(_EMBEDDING),
    }
    for layer in range(_LAYERS):
        block = {
            "attn_norm.weight": np.ones(_EMBEDDING),
            "post_attention_norm.weight": np.ones(_EMBEDDING),
            "attn_q.weight": drawn(_HEADS * _HEAD, _EMBEDDING),
            "attn_k.weight": drawn(_KV_HEADS * _HEAD, _EMBEDDING),
            "attn_v.weight": drawn(_KV_HEADS * _HEAD, _EMBEDDING),
            "attn_output.weight": drawn(_EMBEDDING, _HEADS * _HEAD),
            "attn_q_norm.weight": np.ones(_HEAD),
            "attn_k_norm.weight": np.ones(_HEAD),
            "ffn_norm.weight": np.ones(_EMBEDDING),
            "post_ffw_norm.weight": np.ones(_EMBEDDING),
            "ffn_gate.weight": drawn(_FEED_FORWARD, _EMBEDDING),
            "ffn_up.weight": drawn(_FEED_FORWARD, _EMBEDDING),
            "ffn_down.weight": drawn(_EMBEDDING, _FEED_FORWARD),
        }
        tensors |= {f"blk.{layer}.{name}": tensor for name, tensor in block.items()}
    return tensors


_EMBEDDING, _LAYERS, _HEADS, _INNER, _CONTEXT = 64, 2, 4, 128, 4096
# How many pairs of a head's dimensions turn with the time, the height and the width.
_SECTIONS = (2, 3, 3, 0)


def write_tiny_mrope(path: Path) -> Path:
    """Write a GGUF of half a megabyte with a vocabulary of bytes, the same one every time."""
    writer = GGUFWriter(path, "qwen2vl")
    writer.add_context_length(_CONTEXT)
    writer.add_embedding_length(_EMBEDDING)
    writer.add_feed_forward_length(_INNER)
    writer.add_head_count(_HEADS)
    writer.add_head_count_kv(_HEADS)
    writer.add_block_count(_LAYERS)
    writer.add_rope_dimension_sections(_SECTIONS)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(TOKENS)
    writer.add_token_scores([0.0] * len(TOKENS))
    writer.add_token_types(TYPES)
    write_weights(writer, _tiny_mrope_tensors())
    return path


def _tiny_mrope_tensors() -> dict[str, NDArray[np.float32]]:
    random = np.random.default_rng(11)

    def drawn(*sizes: int, scale: float = 1.0) -> NDArray[np.float32]:
        numbers: NDArray[np.float64] = scale * random.standard_normal(sizes) / np.sqrt(sizes[-1])
        return numbers.astype(np.float32)

    tensors = {
        "token_embd.weight": drawn(len(TOKENS), _EMBEDDING, scale=8.0),
        "output_norm.weight": np.ones(_EMBEDDING, np.float32),
        "output.weight": drawn(len(TOKENS), _EMBEDDING, scale=8.0),
    }
    for layer in range(_LAYERS):
        block = {
            "attn_norm.weight": np.ones(_EMBEDDING, np.float32),
            "ffn_norm.weight": np.ones(_EMBEDDING, np.float32),
            "attn_output.weight": drawn(_EMBEDDING, _EMBEDDING, scale=2.0),
            "ffn_gate.weight": drawn(_INNER, _EMBEDDING),
            "ffn_up.weight": drawn(_INNER, _EMBEDDING),
            "ffn_down.weight": drawn(_EMBEDDING, _INNER),
        }
        for part in ("attn_q", "attn_k", "attn_v"):
            block |= {f"{part}.weight": drawn(_EMBEDDING, _EMBEDDING, scale=2.0), f"{part}.bias": drawn(_EMBEDDING)}
        tensors |= {f"blk.{layer}.{name}": tensor for name, tensor in block.items()}
    return tensors


EMBEDDING = 64
GEMMA_WINDOW = 32
_LAYERS, _HEADS, _HEAD, _INNER, _CONTEXT = 6, 4, 16, 128, 2048


def write_tiny_gemma(path: Path) -> Path:
    """Write a GGUF of 1.3 MB with a vocabulary of bytes, the same one every time."""
    writer = GGUFWriter(path, "gemma3")
    writer.add_context_length(_CONTEXT)
    writer.add_embedding_length(EMBEDDING)
    writer.add_feed_forward_length(_INNER)
    writer.add_head_count(_HEADS)
    writer.add_head_count_kv(_HEADS)
    writer.add_key_length(_HEAD)
    writer.add_value_length(_HEAD)
    writer.add_block_count(_LAYERS)
    writer.add_sliding_window(GEMMA_WINDOW)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(TOKENS)
    writer.add_token_scores([0.0] * len(TOKENS))
    writer.add_token_types(TYPES)
    for name, tensor in _tiny_gemma_tensors().items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _tiny_gemma_tensors() -> dict[str, NDArray[np.float32]]:
    random = np.random.default_rng(12)

    def drawn(*sizes: int, scale: float = 1.0) -> NDArray[np.float32]:
        numbers: NDArray[np.float64] = scale * random.standard_normal(sizes) / np.sqrt(sizes[-1])
        return numbers.astype(np.float32)

    tensors = {
        "token_embd.weight": drawn(len(TOKENS), EMBEDDING),
        "output.weight": drawn(len(TOKENS), EMBEDDING, scale=8.0),
        "output_norm.weight": np.ones(EMBEDDING, np.float32),
    }
    inner = _HEADS * _HEAD
    sizes = {"attn_q": (inner, EMBEDDING), "attn_k": (inner, EMBEDDING), "attn_v": (inner, EMBEDDING)}
    sizes |= {"attn_output": (EMBEDDING, inner), "ffn_gate": (_INNER, EMBEDDING), "ffn_up": (_INNER, EMBEDDING)}
    sizes |= {"ffn_down": (EMBEDDING, _INNER)}
    norms = {
        "attn_norm": EMBEDDING,
        "post_attention_norm": EMBEDDING,
        "ffn_norm": EMBEDDING,
        "post_ffw_norm": EMBEDDING,
    }
    norms |= {"attn_q_norm": _HEAD, "attn_k_norm": _HEAD}
    for layer in range(_LAYERS):
        tensors |= {f"blk.{layer}.{name}.weight": drawn(*size) for name, size in sizes.items()}
        tensors |= {f"blk.{layer}.{name}.weight": np.ones(size, np.float32) for name, size in norms.items()}
    return tensors


RANK, ALPHA = 4, 8.0


@dataclass(frozen=True)
class Adapted:
    """How large the model is that an adapter is for: the demo model's numbers if nothing is given."""

    architecture: str = "llama"
    embedding: int = 576
    layers: int = 30


DEMO = Adapted()


def write_tiny_lora(
    path: Path, seed: int, model: Adapted = DEMO, *, inputs: int | None = None, kind: str = "lora"
) -> Path:
    """Write a GGUF that changes the queries and the outputs of attention; for the demo model it has half a megabyte.

    It fits the model unless ``inputs`` says that it takes vectors of another size.
    """
    writer = GGUFWriter(path, model.architecture)
    writer.add_type(GGUFType.ADAPTER)
    writer.add_string(Keys.Adapter.TYPE, kind)
    writer.add_float32(Keys.Adapter.LORA_ALPHA, ALPHA)
    random = np.random.default_rng(seed)
    for layer in range(model.layers):
        for name in ("attn_q", "attn_output"):
            shapes = {"lora_a": (RANK, inputs or model.embedding), "lora_b": (model.embedding, RANK)}
            for side, shape in shapes.items():
                tensor = random.standard_normal(shape) / np.sqrt(shape[1])
                writer.add_tensor(f"blk.{layer}.{name}.weight.{side}", tensor.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


if __name__ == "__main__":
    main()
