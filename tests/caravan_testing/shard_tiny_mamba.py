"""Writes a recurrent model with random weights. Its output depends on every token before."""

from pathlib import Path

import numpy as np
from gguf import GGUFWriter, TokenType
from numpy.typing import NDArray

from caravan_testing.tiny_weights import RandomWeights, Weights, copy_tokenizer, write_weights

EMBEDDING, LAYERS = 64, 2
INNER, STATE, CONVOLUTION, TIME_STEP_RANK = 128, 16, 4, 4
TOKENS = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
TYPES = [TokenType.UNKNOWN, TokenType.CONTROL, TokenType.CONTROL, *[TokenType.BYTE] * 256]


def write_tiny_mamba(path: Path, tokenizer_of: Path | None = None) -> Path:
    """Write a GGUF of half a megabyte with a vocabulary of bytes, or that of another model; the same one every time."""
    writer = GGUFWriter(path, "mamba")
    writer.add_context_length(4096)
    writer.add_embedding_length(EMBEDDING)
    writer.add_feed_forward_length(0)
    writer.add_head_count(0)
    writer.add_block_count(LAYERS)
    writer.add_ssm_conv_kernel(CONVOLUTION)
    writer.add_ssm_inner_size(INNER)
    writer.add_ssm_state_size(STATE)
    writer.add_ssm_time_step_rank(TIME_STEP_RANK)
    writer.add_layer_norm_rms_eps(1e-5)
    if tokenizer_of is not None:
        tokens = copy_tokenizer(tokenizer_of, writer)
    else:
        tokens = len(TOKENS)
        writer.add_tokenizer_model("llama")
        writer.add_token_list(TOKENS)
        writer.add_token_scores([0.0] * tokens)
        writer.add_token_types(TYPES)
    write_weights(writer, _tensors(np.random.default_rng(5), tokens))
    return path


def _tensors(random: np.random.Generator, tokens: int) -> dict[str, NDArray[np.float64]]:
    def weights(*shape: int) -> NDArray[np.float64]:
        drawn: NDArray[np.float64] = random.standard_normal(shape) / np.sqrt(shape[-1])
        return drawn

    tensors = {
        "token_embd.weight": weights(tokens, EMBEDDING) * np.sqrt(EMBEDDING),
        "output_norm.weight": np.ones(EMBEDDING),
        "output.weight": weights(tokens, EMBEDDING) * 4,
    }
    for layer in range(LAYERS):
        block = {
            "attn_norm.weight": np.ones(EMBEDDING),
            "ssm_in.weight": weights(2 * INNER, EMBEDDING),
            "ssm_conv1d.weight": weights(INNER, CONVOLUTION),
            "ssm_conv1d.bias": np.zeros(INNER),
            "ssm_x.weight": weights(TIME_STEP_RANK + 2 * STATE, INNER) * 4,
            "ssm_dt.weight": weights(INNER, TIME_STEP_RANK),
            # Slow decay: tokens of long ago still matter.
            "ssm_dt.bias": np.full(INNER, -1.0),
            "ssm_a": -np.tile(np.arange(1.0, STATE + 1), (INNER, 1)) / STATE / 50,
            "ssm_d": np.full(INNER, 0.1),
            "ssm_out.weight": weights(EMBEDDING, INNER),
        }
        tensors |= {f"blk.{layer}.{name}": tensor for name, tensor in block.items()}
    return tensors


_EMBEDDING, _LAYERS, _HEADS, _KV_HEADS, _FEED_FORWARD, _CONTEXT = 64, 4, 4, 2, 128, 8192
_INNER, _STATE, _CONVOLUTION, _GROUPS, _STATE_HEADS = 128, 16, 4, 1, 4
_CONVOLVED = _INNER + 2 * _GROUPS * _STATE


def write_tiny_hybrid(path: Path, tokenizer_of: Path) -> Path:
    """Write a GGUF of the architecture granitehybrid, with the tokenizer and template of another; always the same."""
    writer = GGUFWriter(path, "granitehybrid")
    writer.add_context_length(_CONTEXT)
    writer.add_embedding_length(_EMBEDDING)
    writer.add_feed_forward_length(_FEED_FORWARD)
    writer.add_head_count(_HEADS)
    # A layer without them is recurrent.
    writer.add_head_count_kv([0 if _is_recurrent(layer) else _KV_HEADS for layer in range(_LAYERS)])
    writer.add_block_count(_LAYERS)
    writer.add_rope_dimension_count(_EMBEDDING // _HEADS)
    writer.add_ssm_conv_kernel(_CONVOLUTION)
    writer.add_ssm_inner_size(_INNER)
    writer.add_ssm_state_size(_STATE)
    writer.add_ssm_group_count(_GROUPS)
    writer.add_ssm_time_step_rank(_STATE_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    write_weights(writer, _tiny_hybrid_tensors(copy_tokenizer(tokenizer_of, writer)))
    return path


def _is_recurrent(layer: int) -> bool:
    return layer % 2 == 0


def _tiny_hybrid_tensors(tokens: int) -> dict[str, Weights]:
    drawn = RandomWeights(13)
    tensors = {
        # The same matrix makes the logits.
        "token_embd.weight": drawn(tokens, _EMBEDDING, scale=8.0),
        "output_norm.weight": np.ones(_EMBEDDING),
    }
    for layer in range(_LAYERS):
        block = {
            "attn_norm.weight": np.ones(_EMBEDDING),
            "ffn_norm.weight": np.ones(_EMBEDDING),
            "ffn_gate.weight": drawn(_FEED_FORWARD, _EMBEDDING),
            "ffn_up.weight": drawn(_FEED_FORWARD, _EMBEDDING),
            "ffn_down.weight": drawn(_EMBEDDING, _FEED_FORWARD),
        }
        if _is_recurrent(layer):
            block |= {
                "ssm_in.weight": drawn(_INNER + _CONVOLVED + _STATE_HEADS, _EMBEDDING),
                "ssm_conv1d.weight": drawn(_CONVOLVED, _CONVOLUTION, scale=2.0),
                "ssm_conv1d.bias": np.zeros(_CONVOLVED),
                "ssm_dt.bias": np.full(_STATE_HEADS, -1.0),
                # Slow decay: tokens of long ago still matter.
                "ssm_a": -np.arange(1.0, _STATE_HEADS + 1).reshape(_STATE_HEADS, 1) / 200,
                "ssm_d": np.full((_STATE_HEADS, 1), 0.1),
                "ssm_norm.weight": np.ones((_GROUPS, _INNER // _GROUPS)),
                "ssm_out.weight": drawn(_EMBEDDING, _INNER, scale=4.0),
            }
        else:
            of_keys = _KV_HEADS * _EMBEDDING // _HEADS
            block |= {
                "attn_q.weight": drawn(_EMBEDDING, _EMBEDDING, scale=2.0),
                "attn_k.weight": drawn(of_keys, _EMBEDDING, scale=2.0),
                "attn_v.weight": drawn(of_keys, _EMBEDDING, scale=2.0),
                "attn_output.weight": drawn(_EMBEDDING, _EMBEDDING, scale=4.0),
            }
        tensors |= {f"blk.{layer}.{name}": tensor for name, tensor in block.items()}
    return tensors


_EMBEDDING, _LAYERS, _HEADS, _KV_HEADS, _FEED_FORWARD, _CONTEXT = 64, 4, 4, 2, 128, 8192
_CONVOLUTION = 3


def write_tiny_lfm2(path: Path, tokenizer_of: Path) -> Path:
    """Write a GGUF of the architecture lfm2, with the tokenizer and template of another; always the same."""
    writer = GGUFWriter(path, "lfm2")
    writer.add_context_length(_CONTEXT)
    writer.add_embedding_length(_EMBEDDING)
    writer.add_feed_forward_length(_FEED_FORWARD)
    writer.add_head_count(_HEADS)
    # A layer without them is recurrent.
    writer.add_head_count_kv([0 if _is_recurrent(layer) else _KV_HEADS for layer in range(_LAYERS)])
    writer.add_block_count(_LAYERS)
    writer.add_rope_dimension_count(_EMBEDDING // _HEADS)
    writer.add_shortconv_l_cache(_CONVOLUTION)
    writer.add_layer_norm_rms_eps(1e-5)
    write_weights(writer, _tiny_lfm2_tensors(copy_tokenizer(tokenizer_of, writer)))
    return path


def _tiny_lfm2_tensors(tokens: int) -> dict[str, Weights]:
    drawn = RandomWeights(17)
    tensors = {
        "token_embd.weight": drawn(tokens, _EMBEDDING),
        "output.weight": drawn(tokens, _EMBEDDING, scale=8.0),
        "token_embd_norm.weight": np.ones(_EMBEDDING),
    }
    for layer in range(_LAYERS):
        block = {
            "attn_norm.weight": np.ones(_EMBEDDING),
            "ffn_norm.weight": np.ones(_EMBEDDING),
            "ffn_gate.weight": drawn(_FEED_FORWARD, _EMBEDDING),
            "ffn_up.weight": drawn(_FEED_FORWARD, _EMBEDDING),
            "ffn_down.weight": drawn(_EMBEDDING, _FEED_FORWARD),
        }
        if _is_recurrent(layer):
            block |= {
                "shortconv.conv.weight": drawn(_EMBEDDING, _CONVOLUTION, scale=2.0),
                "shortconv.in_proj.weight": drawn(3 * _EMBEDDING, _EMBEDDING),
                "shortconv.out_proj.weight": drawn(_EMBEDDING, _EMBEDDING, scale=2.0),
            }
        else:
            head = _EMBEDDING // _HEADS
            block |= {
                "attn_q.weight": drawn(_EMBEDDING, _EMBEDDING),
                "attn_k.weight": drawn(_KV_HEADS * head, _EMBEDDING),
                "attn_v.weight": drawn(_KV_HEADS * head, _EMBEDDING, scale=2.0),
                "attn_output.weight": drawn(_EMBEDDING, _EMBEDDING, scale=4.0),
                "attn_q_norm.weight": np.ones(head),
                "attn_k_norm.weight": np.ones(head),
            }
        tensors |= {f"blk.{layer}.{name}": tensor for name, tensor in block.items()}
    return tensors
