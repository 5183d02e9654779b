"""Writes models that only embed, with random weights, and computes what they should say, without llama.cpp."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from gguf import GGUFWriter, PoolingType, TokenType
from numpy.typing import NDArray

EMBEDDING, CONTEXT = 64, 128
_EPSILON = 1e-12
_ROTATION_BASE = 1000.0
_WORDS = ("the", "a", "river", "in", "city", "capital", "of", "is", "paris", "france", "bread", "with", "where", "what")
_LETTERS = "abcdefghijklmnopqrstuvwxyz"
# llama.cpp marks the beginning of a word; in the files of BERT, the other pieces have a mark.
TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"▁{word}" for word in (*_WORDS, *_LETTERS[1:])), *_LETTERS)
PAD, UNKNOWN, CLS, SEP, MASK = range(5)

Vector = NDArray[np.float64]
_Weights = dict[str, NDArray[np.float64]]


@dataclass(frozen=True, slots=True)
class Shape:
    """Numbers of dimensions, layers, heads, dimensions inside of a layer, and positions."""

    embedding: int = EMBEDDING
    layers: int = 2
    heads: int = 4
    inner: int = 128
    context: int = CONTEXT


@dataclass(frozen=True, slots=True)
class TinyBert:
    """A BERT. ``labels`` > 0: it has a head that ranks, with so many outputs.

    ``unnamed``: a control token that the file does not name.
    A ``nomic-bert`` rotates queries and keys by their positions, and has gates and no biases in its feed-forward nets.
    """

    architecture: str = "bert"
    pooling: PoolingType = PoolingType.MEAN
    labels: int = 0
    seed: int = 7
    unnamed: int | None = None
    shape: Shape = Shape()
    tokens: tuple[str, ...] = TOKENS

    def write(self, path: Path) -> Path:
        """Write a GGUF, the same one every time. It has 420 kB if no shape and no tokens are given."""
        shape = self.shape
        writer = GGUFWriter(path, self.architecture)
        writer.add_context_length(shape.context)
        writer.add_embedding_length(shape.embedding)
        writer.add_feed_forward_length(shape.inner)
        writer.add_head_count(shape.heads)
        writer.add_block_count(shape.layers)
        writer.add_layer_norm_eps(_EPSILON)
        writer.add_causal_attention(False)
        writer.add_pooling_type(self.pooling)
        writer.add_token_type_count(2)
        writer.add_rope_freq_base(_ROTATION_BASE)
        if self.labels:
            writer.add_classifier_output_labels([f"label {number}" for number in range(self.labels)])
        writer.add_tokenizer_model("bert")
        writer.add_token_list(self.tokens)
        writer.add_token_types([TokenType.CONTROL] * 5 + [TokenType.NORMAL] * (len(self.tokens) - 5))
        for name, token in (
            (writer.add_bos_token_id, CLS),
            (writer.add_unk_token_id, UNKNOWN),
            (writer.add_sep_token_id, SEP),
            (writer.add_pad_token_id, PAD),
            (writer.add_mask_token_id, MASK),
        ):
            if token != self.unnamed:
                name(token)
        for tensor_name, tensor in self._weights().items():
            writer.add_tensor(tensor_name, tensor.astype(np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    def vector(self, tokens: Sequence[int]) -> Vector:
        """Return the vector of a text, of length 1."""
        states = self._states(tokens)
        vector: Vector = states[0] if self.pooling is PoolingType.CLS else states.mean(axis=0)
        return vector / np.linalg.norm(vector)

    def relevance(self, tokens: Sequence[int]) -> float:
        """Return the relevance of a pair, from 0 to 1: the first output of the head."""
        weights = self._weights()
        pooled = np.tanh(weights["cls.weight"] @ self._states(tokens)[0] + weights["cls.bias"])
        outputs = weights["cls.output.weight"] @ pooled + weights["cls.output.bias"]
        return float(1 / (1 + np.exp(-outputs[0])))

    def _states(self, tokens: Sequence[int]) -> NDArray[np.float64]:
        """Return the last hidden states [tokens, embedding], as in the paper; every token is of the first sentence."""
        weights = self._weights()
        states = weights["token_embd.weight"][list(tokens)]
        if not self._is_nomic:
            states = states + weights["position_embd.weight"][: len(tokens)]
        states = _normalized(states + weights["token_types.weight"][0], weights, "token_embd_norm")
        for layer in range(self.shape.layers):
            name = f"blk.{layer}"
            queries, keys, values = (
                _heads(_linear(states, weights, f"{name}.attn_{part}"), self.shape.heads) for part in "qkv"
            )
            if self._is_nomic:
                queries, keys = _rotated(queries), _rotated(keys)
            scores = np.exp(queries @ keys.transpose(0, 2, 1) / np.sqrt(queries.shape[-1]))
            mixed = (scores / scores.sum(axis=-1, keepdims=True)) @ values
            attended = _linear(mixed.transpose(1, 0, 2).reshape(len(tokens), -1), weights, f"{name}.attn_output")
            states = _normalized(states + attended, weights, f"{name}.attn_output_norm")
            if self._is_nomic:
                gates, inner = (states @ weights[f"{name}.ffn_{part}.weight"].T for part in ("gate", "up"))
                changes = (gates / (1 + np.exp(-gates)) * inner) @ weights[f"{name}.ffn_down.weight"].T
            else:
                changes = _linear(_gelu(_linear(states, weights, f"{name}.ffn_up")), weights, f"{name}.ffn_down")
            states = _normalized(states + changes, weights, f"{name}.layer_output_norm")
        return states

    @property
    def _is_nomic(self) -> bool:
        return self.architecture == "nomic-bert"

    def _weights(self) -> _Weights:
        shape, random = self.shape, np.random.default_rng(self.seed)

        def drawn(*sizes: int) -> NDArray[np.float64]:
            # Rounded as they are in the file.
            numbers: NDArray[np.float64] = random.standard_normal(sizes) / np.sqrt(sizes[-1])
            return numbers.astype(np.float32).astype(np.float64)

        def linear(name: str, outputs: int, inputs: int) -> _Weights:
            return {f"{name}.weight": drawn(outputs, inputs), f"{name}.bias": drawn(outputs)}

        def norm(name: str) -> _Weights:
            return {f"{name}.weight": 1 + drawn(shape.embedding), f"{name}.bias": drawn(shape.embedding)}

        weights = {
            "token_embd.weight": drawn(len(self.tokens), shape.embedding) * 8,
            "token_types.weight": drawn(2, shape.embedding),
            **norm("token_embd_norm"),
        }
        if not self._is_nomic:
            weights["position_embd.weight"] = drawn(shape.context, shape.embedding) * 4
        for layer in range(shape.layers):
            for part in ("attn_q", "attn_k", "attn_v", "attn_output"):
                weights |= linear(f"blk.{layer}.{part}", shape.embedding, shape.embedding)
            if self._is_nomic:
                for part in ("gate", "up"):
                    weights[f"blk.{layer}.ffn_{part}.weight"] = drawn(shape.inner, shape.embedding)
                weights[f"blk.{layer}.ffn_down.weight"] = drawn(shape.embedding, shape.inner)
            else:
                weights |= linear(f"blk.{layer}.ffn_up", shape.inner, shape.embedding)
                weights |= linear(f"blk.{layer}.ffn_down", shape.embedding, shape.inner)
            weights |= norm(f"blk.{layer}.attn_output_norm") | norm(f"blk.{layer}.layer_output_norm")
        if self.labels:
            weights |= linear("cls", shape.embedding, shape.embedding) | linear(
                "cls.output", self.labels, shape.embedding
            )
        return weights


def _linear(rows: NDArray[np.float64], weights: _Weights, name: str) -> NDArray[np.float64]:
    return rows @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]


def _normalized(rows: NDArray[np.float64], weights: _Weights, name: str) -> NDArray[np.float64]:
    deviation = np.sqrt(rows.var(axis=-1, keepdims=True) + _EPSILON)
    normal: NDArray[np.float64] = (rows - rows.mean(axis=-1, keepdims=True)) / deviation
    return normal * weights[f"{name}.weight"] + weights[f"{name}.bias"]


def _heads(rows: NDArray[np.float64], count: int) -> NDArray[np.float64]:
    return rows.reshape(len(rows), count, -1).transpose(1, 0, 2)


def _rotated(heads: NDArray[np.float64]) -> NDArray[np.float64]:
    """Rotate each pair of numbers, half a head apart, by an angle that grows with the position."""
    half = heads.shape[-1] // 2
    angles = np.outer(np.arange(heads.shape[1]), _ROTATION_BASE ** (-np.arange(half) / half))
    first, second = heads[..., :half], heads[..., half:]
    sine, cosine = np.sin(angles), np.cos(angles)
    return np.concatenate([first * cosine - second * sine, first * sine + second * cosine], axis=-1)


def _gelu(numbers: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the approximation by a hyperbolic tangent, which llama.cpp computes too."""
    inner = np.sqrt(2 / np.pi) * (numbers + 0.044715 * numbers**3)
    gated: NDArray[np.float64] = 0.5 * numbers * (1 + np.tanh(inner))
    return gated
