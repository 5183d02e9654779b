"""Writes a mixture of experts with random weights, for tests of where its experts lie."""

from pathlib import Path

import numpy as np
from gguf import GGUFWriter

from caravan_testing.shard_tiny_llama import EPSILON
from caravan_testing.shard_tiny_mamba import TOKENS, TYPES

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
