"""Writes a model that ranks, as Qwen3-Reranker does, with random weights."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from gguf import GGUFWriter, PoolingType, TokenType
from numpy.typing import NDArray

from caravan_testing.shard_tiny_mamba import TOKENS, TYPES

EMBEDDING, LAYERS, HEADS, INNER = 64, 2, 4, 128
HEAD = EMBEDDING // HEADS
# The texts of the pair are between control tokens, as in the template of Qwen3-Reranker.
TEMPLATE = "<|q|>\n{query}<|d|>\n{document}<|end|>"


def classifier() -> NDArray[np.float64]:
    """Return the weights [2, embedding] of the answers yes and no."""
    drawn: NDArray[np.float64] = np.random.default_rng(6).standard_normal((2, EMBEDDING)) / 8
    return drawn


def write_tiny_ranker(
    path: Path,
    *,
    template: str = TEMPLATE,
    tokens: Sequence[str] = TOKENS,
    controls: Sequence[str] = (),
    end: int = 2,
    separates: bool = False,
) -> Path:
    """Write a GGUF of half a megabyte with a vocabulary of bytes; the same one every time.

    ``controls``: more control tokens. ``end``: its EOS. ``separates``: it wants a separator, and names none.
    """
    others = [*[TokenType.UNUSED] * (len(tokens) - len(TYPES)), *[TokenType.CONTROL] * len(controls)]
    tokens = [*tokens, *controls]
    writer = GGUFWriter(path, "qwen3")
    writer.add_context_length(512)
    writer.add_embedding_length(EMBEDDING)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_key_length(HEAD)
    writer.add_value_length(HEAD)
    writer.add_block_count(LAYERS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_pooling_type(PoolingType.RANK)
    writer.add_classifier_output_labels(["yes", "no"])
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_eos_token_id(end)
    writer.add_token_scores([0.0] * len(tokens))
    writer.add_token_types([*TYPES, *others])
    writer.add_add_bos_token(False)
    writer.add_add_space_prefix(False)
    if separates:
        writer.add_add_sep_token(True)
    if template:
        writer.add_chat_template([{"name": "rerank", "template": template}])
    for name, tensor in _tensors(np.random.default_rng(5), len(tokens)).items():
        writer.add_tensor(name, tensor.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _tensors(random: np.random.Generator, vocabulary_size: int) -> dict[str, NDArray[np.float64]]:
    def weights(*shape: int) -> NDArray[np.float64]:
        drawn: NDArray[np.float64] = random.standard_normal(shape) / np.sqrt(shape[-1])
        return drawn

    tensors = {
        "token_embd.weight": weights(vocabulary_size, EMBEDDING) * np.sqrt(EMBEDDING),
        "output_norm.weight": np.ones(EMBEDDING),
        "cls.output.weight": classifier(),
    }
    for layer in range(LAYERS):
        block = {
            "attn_norm.weight": np.ones(EMBEDDING),
            "attn_q.weight": weights(EMBEDDING, EMBEDDING),
            "attn_k.weight": weights(EMBEDDING, EMBEDDING),
            "attn_v.weight": weights(EMBEDDING, EMBEDDING),
            "attn_output.weight": weights(EMBEDDING, EMBEDDING),
            "attn_q_norm.weight": np.ones(HEAD),
            "attn_k_norm.weight": np.ones(HEAD),
            "ffn_norm.weight": np.ones(EMBEDDING),
            "ffn_gate.weight": weights(INNER, EMBEDDING),
            "ffn_up.weight": weights(INNER, EMBEDDING),
            "ffn_down.weight": weights(EMBEDDING, INNER),
        }
        tensors |= {f"blk.{layer}.{name}": tensor for name, tensor in block.items()}
    return tensors
