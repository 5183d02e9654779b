"""Writes a recurrent model with random weights. Its output depends on every token before."""

from pathlib import Path

import numpy as np
from gguf import GGUFWriter, TokenType
from numpy.typing import NDArray

from caravan_testing.tiny_weights import copy_tokenizer, write_weights

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
