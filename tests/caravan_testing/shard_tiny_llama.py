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
from gguf import GGUFWriter
from numpy.typing import NDArray

from caravan_testing.shard_tiny_mamba import TOKENS, TYPES
from caravan_testing.tiny_weights import copy_tokenizer

CONTEXT, EPSILON = 512, 1e-5


@dataclass(frozen=True)
class Shape:
    """Numbers of dimensions, layers, heads, dimensions inside of a layer, and tokens that it was made for.

    ``trunk``: how much the layers write, 1 for as much as usual.
    """

    embedding: int = 64
    layers: int = 2
    heads: int = 4
    inner: int = 128
    context: int = CONTEXT
    trunk: float = 1.0


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
    tensors = tensors_of(shape, tokens)
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


def tensors_of(shape: Shape, tokens: int) -> dict[str, NDArray[np.float32]]:
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
            "attn_output.weight": weights(embedding, embedding, scale=2.0 * shape.trunk),
            "ffn_norm.weight": np.ones(embedding, np.float32),
            "ffn_gate.weight": weights(inner, embedding),
            "ffn_up.weight": weights(inner, embedding),
            "ffn_down.weight": weights(embedding, inner, scale=shape.trunk),
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
    for name, tensor in tensors_of(_TINY, len(TOKENS)).items():
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


if __name__ == "__main__":
    main()
