"""Writes EAGLE-3 heads for tiny models of 64 dimensions whose layers write next to nothing.

The next token of such a model follows nearly always from the last one alone. In the head, each token attends to itself,
so that its logits are those of the model, as far as what it reads of the model's layers does not change them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter

from caravan_testing.shard_tiny_llama import Shape, tensors_of, write_tiny_llama
from caravan_testing.tiny_weights import RandomWeights, Weights, copy_tokenizer

_EMBEDDING, _HEADS, _FEED_FORWARD, _CONTEXT = 64, 4, 128, 8192
# So large that each token attends to itself.
_ATTENTION = 6.0
# The model of the heads that have an output layer.
_MODEL = Shape(layers=4, context=_CONTEXT, trunk=0.0003)


@dataclass(frozen=True, slots=True)
class Eagle3:
    """``state``: the share of what the model's ``layers`` read in what the head computes. ``vocabulary``: its tokens;
    all those of the model if empty. ``norms_input``: it normalizes what it reads, too.
    """

    state: float = 0.01
    layers: Sequence[int] = (0, 2, 3)
    vocabulary: Sequence[int] = ()
    norms_input: bool = False

    def write(self, path: Path, tokenizer_of: Path) -> Path:
        """Write a GGUF with the tokenizer of another; always the same."""
        writer = GGUFWriter(path, "eagle3")
        writer.add_context_length(_CONTEXT)
        writer.add_embedding_length(_EMBEDDING)
        writer.add_feed_forward_length(_FEED_FORWARD)
        writer.add_head_count(_HEADS)
        writer.add_block_count(1)
        writer.add_rope_dimension_count(_EMBEDDING // _HEADS)
        writer.add_layer_norm_rms_eps(1e-6)
        writer.add_array("eagle3.target_layers", list(self.layers))
        writer.add_uint32("eagle3.target_hidden_size", _EMBEDDING)
        # Without, what a draft token has read would stay in the state of the next one.
        writer.add_bool("eagle3.norm_before_residual", True)
        writer.add_bool("eagle3.norm_before_fc", self.norms_input)
        tokens = copy_tokenizer(tokenizer_of, writer)
        for name, tensor in self._tensors(tokens).items():
            writer.add_tensor(name, tensor.astype(np.float32))
        if self.vocabulary:
            writer.add_tensor("d2t", np.array(self.vocabulary, np.int64), raw_dtype=GGMLQuantizationType.I64)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    def _tensors(self, tokens: int) -> dict[str, Weights]:
        drawn = RandomWeights(31)
        itself, nothing = np.eye(_EMBEDDING), np.zeros((_EMBEDDING, _EMBEDDING))
        ones = np.ones(_EMBEDDING)
        of_token = np.concatenate([itself, nothing], axis=1)
        tensors: dict[str, Weights] = {
            "fc.weight": drawn(_EMBEDDING, len(self.layers) * _EMBEDDING),
            "output_norm.weight": ones,
            "blk.0.attn_norm.weight": ones,
            "blk.0.attn_norm_2.weight": ones,
            "blk.0.attn_q.weight": _ATTENTION * of_token,
            "blk.0.attn_k.weight": _ATTENTION * of_token,
            "blk.0.attn_v.weight": of_token,
            "blk.0.attn_output.weight": itself / self.state,
            "blk.0.ffn_norm.weight": ones,
            "blk.0.ffn_gate.weight": drawn(_FEED_FORWARD, _EMBEDDING),
            "blk.0.ffn_up.weight": drawn(_FEED_FORWARD, _EMBEDDING),
            "blk.0.ffn_down.weight": drawn(_EMBEDDING, _FEED_FORWARD),
        }
        if self.norms_input:
            tensors["enc.output_norm.weight"] = np.ones(len(self.layers) * _EMBEDDING)
        if self.vocabulary:
            tensors["output.weight"] = tensors_of(_MODEL, tokens)["output.weight"][list(self.vocabulary)]
        return tensors


def write_tiny_eagle3_llama(path: Path, tokenizer_of: Path) -> Path:
    """Write the model of the heads that have an output layer: a llama, with the tokenizer of another."""
    return write_tiny_llama(path, _MODEL, tokenizer_of)
