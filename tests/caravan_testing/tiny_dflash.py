"""Writes DFlash and DSpark heads, and the models of 64 dimensions that they draft for.

The next token of such a model is the next one of a long cycle: its embedding is that of the last one, turned by some
angles. Each head of the attention finds the last token at one distance, and turns it as often as that is far away. So
each place of a block predicts the right token, as far as what is read of the model's layers does not change it.
"""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter

from caravan_models.gguf_header import read_header
from caravan_testing.tiny_weights import RandomWeights, Weights, copy_tokenizer, finish

_EMBEDDING, _FEED_FORWARD, _CONTEXT, _LAYERS, _RANK = 64, 128, 8192, 2, 8
# Turned dimensions, and the one that is the same for all tokens.
_TURNED, _SAME = 48, 48
_SAME_VALUE = 2.0
# So large that no token at another distance is seen: its score is less than the one of the right distance by 38.
_ATTENTION = 12.0
_ELSEWHERE = 19.0
# The logit of the next token is 18, and that of any other about 11 at most.
_OUTPUT = 0.5


def _cycle(tokens: int) -> tuple[Weights, Weights]:
    """Return the embeddings and the output layer. The last token, which stands for unknown ones, is in no cycle."""
    random = np.random.default_rng(41)
    length = tokens - 1
    angles = np.outer(np.arange(length), 2 * np.pi * _turns(length) / length)
    codes = np.concatenate([np.cos(angles), np.sin(angles)], axis=1)
    order = random.permutation(length)
    embeddings, output = np.zeros((tokens, _EMBEDDING)), np.zeros((tokens, _EMBEDDING))
    embeddings[order, :_TURNED] = codes
    embeddings[:, _SAME] = _SAME_VALUE
    output[order, :_TURNED] = _OUTPUT * np.roll(codes, 1, axis=0)
    return embeddings, output


def _turns(length: int) -> Weights:
    """Return how often each pair of dimensions turns in a cycle."""
    return np.random.default_rng(43).choice(length, _TURNED // 2, replace=False).astype(np.float64)


def _turned(times: int, length: int) -> Weights:
    """Return the matrix that makes of an embedding the one so many places later."""
    angles = times * 2 * np.pi * _turns(length) / length
    cosine, sine = np.diag(np.cos(angles)), np.diag(np.sin(angles))
    return np.block([[cosine, -sine], [sine, cosine]])


def write_cyclic(path: Path, model: Path) -> Path:
    """Write ``model``, whose layers must write next to nothing, with other embeddings and another output layer."""
    shutil.copy(model, path)
    tensors = read_header(path).tensors
    tokens = tensors["token_embd.weight"].lengths[1]
    for name, weights in zip(("token_embd.weight", "output.weight"), _cycle(tokens), strict=True):
        assert tensors[name].kind == GGMLQuantizationType.F32, f"{name} is quantized"
        numbers = np.memmap(path, np.float32, "r+", tensors[name].start, (tokens, _EMBEDDING))
        numbers[:] = weights
        numbers.flush()
    return path


@dataclass(frozen=True, slots=True)
class Dflash:
    """``state``: the share of what the model's ``layers`` read in what the head computes. ``vocabulary``: its tokens;
    all those of the model if empty. ``window``: of its attention; 0 without. ``has_grids``: its positions have several
    dimensions. ``markov``: how much the token before adds to the logits (DSpark); None without. ``from_last``: a place
    predicts the token behind it, not its own. ``is_causal``: no row of a block sees those behind it.
    """

    block: int = 5
    state: float = 0.01
    layers: Sequence[int] = (0, 2, 3)
    vocabulary: Sequence[int] = ()
    window: int = 0
    has_grids: bool = False
    markov: float | None = None
    from_last: bool = False
    is_causal: bool = False

    def write(self, path: Path, tokenizer_of: Path) -> Path:
        """Write a GGUF with the tokenizer of another; always the same."""
        writer = GGUFWriter(path, "dflash")
        writer.add_context_length(_CONTEXT)
        writer.add_embedding_length(_EMBEDDING)
        writer.add_feed_forward_length(_FEED_FORWARD)
        writer.add_head_count(len(self._distances))
        writer.add_head_count_kv(1)
        writer.add_key_length(_EMBEDDING)
        writer.add_value_length(_EMBEDDING)
        writer.add_block_count(_LAYERS)
        writer.add_rope_dimension_count(_EMBEDDING)
        writer.add_layer_norm_rms_eps(1e-6)
        writer.add_array("dflash.target_layers", list(self.layers))
        writer.add_uint32("dflash.block_size", self.block)
        if self.window:
            writer.add_sliding_window(self.window)
            writer.add_sliding_window_pattern([True, False])
        if self.is_causal:
            writer.add_causal_attention(True)
        if self.has_grids:
            writer.add_rope_dimension_sections([_EMBEDDING // 2, 0, 0, 0])
        if self.markov is not None:
            writer.add_bool("dflash.sample_from_anchor", self.from_last)
        tokens = copy_tokenizer(tokenizer_of, writer)
        writer.add_mask_token_id(tokens - 1)
        for name, tensor in self._tensors(tokens).items():
            writer.add_tensor(name, tensor.astype(np.float32))
        if self.vocabulary:
            writer.add_tensor("d2t", np.array(self.vocabulary, np.int64), raw_dtype=GGMLQuantizationType.I64)
        finish(writer)
        return path

    @property
    def _distances(self) -> range:
        """How far from the last known token the predicting places are."""
        return range(0 if self.from_last else 1, self.block)

    def _tensors(self, tokens: int) -> dict[str, Weights]:
        drawn = RandomWeights(31)
        size, layers = _EMBEDDING, len(self.layers)
        encoder = np.zeros((size, layers * size))
        encoder[:_TURNED] = drawn(_TURNED, layers * size, scale=self.state)
        encoder[_SAME, _SAME] = 1.0
        # The rest of the residual is that of the unknown token, and what it has in common with all is not turned.
        norm = np.sqrt(_TURNED / 2 / (_TURNED / 2 + _SAME_VALUE**2)) * np.ones(size)
        tensors: dict[str, Weights] = {
            "fc.weight": encoder,
            "enc.output_norm.weight": np.ones(size),
            "output_norm.weight": norm,
        }
        for layer in range(_LAYERS):
            block = {
                "attn_norm.weight": np.ones(size),
                "attn_q_norm.weight": _ATTENTION * np.ones(size),
                "attn_k_norm.weight": _ATTENTION * np.ones(size),
                **self._attention(tokens - 1),
                "ffn_norm.weight": np.ones(size),
                "ffn_gate.weight": drawn(_FEED_FORWARD, size),
                "ffn_up.weight": drawn(_FEED_FORWARD, size),
                "ffn_down.weight": drawn(size, _FEED_FORWARD),
            }
            if layer:
                block["attn_output.weight"] = drawn(size, len(self._distances) * size)
            tensors |= {f"blk.{layer}.{name}": tensor for name, tensor in block.items()}
        if self.vocabulary:
            tensors["output.weight"] = _cycle(tokens)[1][list(self.vocabulary)]
        if self.markov is not None:
            tensors["markov_w1.weight"] = drawn(tokens, _RANK)
            tensors["markov_w2.weight"] = drawn(len(self.vocabulary) or tokens, _RANK, scale=self.markov)
            tensors["conf_proj.weight"] = drawn(1, size + _RANK)
        return tensors

    def _attention(self, length: int) -> dict[str, Weights]:
        """Return weights by which each head copies the token at one distance, turned."""
        size, half = _EMBEDDING, _EMBEDDING // 2
        angles = 10_000.0 ** (-np.arange(half) / half)
        query = np.zeros((len(self._distances) * size, size))
        key, value = np.zeros((size, size)), np.zeros((size, size))
        key[:half, _SAME] = 1.0
        value[:_TURNED, :_TURNED] = np.eye(_TURNED)
        output = np.zeros((size, len(self._distances) * size))
        for head, distance in enumerate(self._distances):
            start = head * size
            query[start : start + half, _SAME] = np.cos(distance * angles)
            query[start + half : start + size, _SAME] = -np.sin(distance * angles)
            output[:_TURNED, start : start + _TURNED] = _turned(head, length) / self.state
        return {
            "attn_q.weight": query,
            "attn_k.weight": key,
            "attn_v.weight": value,
            "attn_output.weight": output,
            # Where there is no token at its distance, a head sees none.
            "attn_sinks.weight": np.full(len(self._distances), _ATTENTION**2 * np.sqrt(size) - _ELSEWHERE),
        }
