"""Writes hybrid models with random weights whose recurrent layers are gated delta nets: those of Qwen3-Next, a mixture
of experts, and of Qwen3.5, whose positions have several dimensions, with or without experts and a head that drafts.
"""

from pathlib import Path

import numpy as np
from gguf import GGUFWriter

from caravan_testing.tiny_heads import Heads
from caravan_testing.tiny_weights import RandomWeights, Weights, copy_tokenizer, write_weights

_EMBEDDING, _LAYERS, _HEADS, _KV_HEADS, _FEED_FORWARD, _CONTEXT = 64, 4, 4, 2, 128, 8192
_HEAD = _EMBEDDING // _HEADS
# Every other layer attends.
_INTERVAL = 2
_EXPERTS, _USED, _EXPERT = 4, 2, 64
_CONVOLUTION, _STATE, _KEY_HEADS, _VALUE_HEADS = 4, 16, 2, 4
_KEYS, _VALUES = _STATE * _KEY_HEADS, _STATE * _VALUE_HEADS
# How many pairs of a head's dimensions turn with the time, the height and the width.
_SECTIONS = (3, 3, 2, 0)


def write_tiny_qwen3next(path: Path, tokenizer_of: Path) -> Path:
    """Write a GGUF of the architecture qwen3next, with the tokenizer and template of another; always the same."""
    writer = _begun(path, "qwen3next")
    writer.add_block_count(_LAYERS)
    _add_experts(writer)
    write_weights(writer, _tensors(copy_tokenizer(tokenizer_of, writer), has_experts=True, joins_gates=True))
    return path


def write_tiny_qwen35(path: Path, tokenizer_of: Path, heads: Heads | None = None, *, has_experts: bool = False) -> Path:
    """Write a GGUF of the architecture qwen35, or qwen35moe, with the tokenizer and template of another."""
    writer = _begun(path, "qwen35moe" if has_experts else "qwen35")
    writer.add_rope_dimension_sections(_SECTIONS)
    if has_experts:
        _add_experts(writer)
    tensors = _tensors(copy_tokenizer(tokenizer_of, writer), has_experts=has_experts, joins_gates=False)
    if heads is None:
        writer.add_block_count(_LAYERS)
    else:
        writer.add_block_count(_LAYERS + 1)
        writer.add_nextn_predict_layers(1)
        drawn = RandomWeights(23)
        layer = _layer(drawn, _attention(drawn), has_experts=has_experts)
        tensors = heads.added(tensors, _LAYERS, layer, drawn)
    write_weights(writer, tensors)
    return path


def _begun(path: Path, architecture: str) -> GGUFWriter:
    writer = GGUFWriter(path, architecture)
    writer.add_context_length(_CONTEXT)
    writer.add_embedding_length(_EMBEDDING)
    writer.add_feed_forward_length(_FEED_FORWARD)
    writer.add_head_count(_HEADS)
    writer.add_head_count_kv(_KV_HEADS)
    writer.add_key_length(_HEAD)
    writer.add_value_length(_HEAD)
    writer.add_rope_dimension_count(_HEAD)
    writer.add_full_attention_interval(_INTERVAL)
    writer.add_ssm_conv_kernel(_CONVOLUTION)
    writer.add_ssm_inner_size(_VALUES)
    writer.add_ssm_state_size(_STATE)
    writer.add_ssm_group_count(_KEY_HEADS)
    writer.add_ssm_time_step_rank(_VALUE_HEADS)
    writer.add_layer_norm_rms_eps(1e-6)
    return writer


def _add_experts(writer: GGUFWriter) -> None:
    writer.add_expert_count(_EXPERTS)
    writer.add_expert_used_count(_USED)
    writer.add_expert_feed_forward_length(_EXPERT)
    writer.add_expert_shared_feed_forward_length(_EXPERT)


def _tensors(tokens: int, *, has_experts: bool, joins_gates: bool) -> dict[str, Weights]:
    drawn = RandomWeights(19)
    tensors = {
        "token_embd.weight": drawn(tokens, _EMBEDDING),
        "output.weight": drawn(tokens, _EMBEDDING, scale=8.0),
        "output_norm.weight": np.ones(_EMBEDDING),
    }
    for layer in range(_LAYERS):
        attends = (layer + 1) % _INTERVAL == 0
        mixes = _attention(drawn) if attends else _delta_net(drawn, joins_gates=joins_gates)
        block = _layer(drawn, mixes, has_experts=has_experts)
        tensors |= {f"blk.{layer}.{name}": tensor for name, tensor in block.items()}
    return tensors


def _layer(drawn: RandomWeights, mixes: dict[str, Weights], *, has_experts: bool) -> dict[str, Weights]:
    """Return a layer that mixes tokens with ``mixes``."""
    norms = {"attn_norm.weight": np.ones(_EMBEDDING), "post_attention_norm.weight": np.ones(_EMBEDDING)}
    return norms | mixes | (_experts(drawn) if has_experts else _feed_forward(drawn))


def _attention(drawn: RandomWeights) -> dict[str, Weights]:
    return {
        # The queries and their gates.
        "attn_q.weight": drawn(2 * _HEADS * _HEAD, _EMBEDDING),
        "attn_k.weight": drawn(_KV_HEADS * _HEAD, _EMBEDDING),
        "attn_v.weight": drawn(_KV_HEADS * _HEAD, _EMBEDDING, scale=2.0),
        "attn_output.weight": drawn(_EMBEDDING, _HEADS * _HEAD, scale=4.0),
        "attn_q_norm.weight": np.ones(_HEAD),
        "attn_k_norm.weight": np.ones(_HEAD),
    }


def _delta_net(drawn: RandomWeights, *, joins_gates: bool) -> dict[str, Weights]:
    """``joins_gates``: whether one matrix makes what a token forgets and what it writes."""
    block = {
        "attn_qkv.weight": drawn(2 * _KEYS + _VALUES, _EMBEDDING),
        "attn_gate.weight": drawn(_VALUES, _EMBEDDING),
        "ssm_conv1d.weight": drawn(2 * _KEYS + _VALUES, _CONVOLUTION, scale=2.0),
        "ssm_dt.bias": np.full(_VALUE_HEADS, -1.0),
        # Slow decay: tokens of long ago still matter.
        "ssm_a": -np.arange(1.0, _VALUE_HEADS + 1) / 200,
        "ssm_norm.weight": np.ones(_STATE),
        "ssm_out.weight": drawn(_EMBEDDING, _VALUES, scale=4.0),
    }
    if joins_gates:
        return block | {"ssm_ba.weight": drawn(2 * _VALUE_HEADS, _EMBEDDING)}
    gates = {"ssm_beta.weight": drawn(_VALUE_HEADS, _EMBEDDING), "ssm_alpha.weight": drawn(_VALUE_HEADS, _EMBEDDING)}
    return block | gates


def _feed_forward(drawn: RandomWeights) -> dict[str, Weights]:
    return {
        "ffn_gate.weight": drawn(_FEED_FORWARD, _EMBEDDING),
        "ffn_up.weight": drawn(_FEED_FORWARD, _EMBEDDING),
        "ffn_down.weight": drawn(_EMBEDDING, _FEED_FORWARD),
    }


def _experts(drawn: RandomWeights) -> dict[str, Weights]:
    return {
        "ffn_gate_inp.weight": drawn(_EXPERTS, _EMBEDDING),
        "ffn_gate_exps.weight": drawn(_EXPERTS, _EXPERT, _EMBEDDING),
        "ffn_up_exps.weight": drawn(_EXPERTS, _EXPERT, _EMBEDDING),
        "ffn_down_exps.weight": drawn(_EXPERTS, _EMBEDDING, _EXPERT),
        "ffn_gate_inp_shexp.weight": drawn(_EMBEDDING),
        "ffn_gate_shexp.weight": drawn(_EXPERT, _EMBEDDING),
        "ffn_up_shexp.weight": drawn(_EXPERT, _EMBEDDING),
        "ffn_down_shexp.weight": drawn(_EMBEDDING, _EXPERT),
    }
