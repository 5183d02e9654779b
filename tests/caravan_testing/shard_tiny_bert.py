"""Writes models that only embed, with random weights, and computes what they should say, without llama.cpp."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from gguf import GGUFWriter, PoolingType, TokenType
from numpy.typing import NDArray

EMBEDDING, LAYERS, HEADS, INNER, CONTEXT = 64, 2, 4, 128, 128
_HEAD = EMBEDDING // HEADS
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
class TinyBert:
    """A BERT with two layers. ``labels`` > 0: it has a head that ranks, with so many outputs.

    ``unnamed``: a control token that the file does not name.
    A ``nomic-bert`` rotates queries and keys by their positions, and has gates and no biases in its feed-forward nets.
    """

    architecture: str = "bert"
    pooling: PoolingType = PoolingType.MEAN
    labels: int = 0
    seed: int = 7
    unnamed: int | None = None

    def write(self, path: Path) -> Path:
        """Write a GGUF of 420 kB with the tokens `TOKENS`; the same one every time."""
        writer = GGUFWriter(path, self.architecture)
        writer.add_context_length(CONTEXT)
        writer.add_embedding_length(EMBEDDING)
        writer.add_feed_forward_length(INNER)
        writer.add_head_count(HEADS)
        writer.add_block_count(LAYERS)
        writer.add_layer_norm_eps(_EPSILON)
        writer.add_causal_attention(False)
        writer.add_pooling_type(self.pooling)
        writer.add_token_type_count(2)
        writer.add_rope_freq_base(_ROTATION_BASE)
        if self.labels:
            writer.add_classifier_output_labels([f"label {number}" for number in range(self.labels)])
        writer.add_tokenizer_model("bert")
        writer.add_token_list(TOKENS)
        writer.add_token_types([TokenType.CONTROL] * 5 + [TokenType.NORMAL] * (len(TOKENS) - 5))
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
        for layer in range(LAYERS):
            name = f"blk.{layer}"
            queries, keys, values = (_heads(_linear(states, weights, f"{name}.attn_{part}")) for part in "qkv")
            if self._is_nomic:
                queries, keys = _rotated(queries), _rotated(keys)
            scores = np.exp(queries @ keys.transpose(0, 2, 1) / np.sqrt(_HEAD))
            mixed = (scores / scores.sum(axis=-1, keepdims=True)) @ values
            attended = _linear(mixed.transpose(1, 0, 2).reshape(len(tokens), EMBEDDING), weights, f"{name}.attn_output")
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
        random = np.random.default_rng(self.seed)

        def drawn(*shape: int) -> NDArray[np.float64]:
            # Rounded as they are in the file.
            numbers: NDArray[np.float64] = random.standard_normal(shape) / np.sqrt(shape[-1])
            return numbers.astype(np.float32).astype(np.float64)

        def linear(name: str, outputs: int, inputs: int) -> _Weights:
            return {f"{name}.weight": drawn(outputs, inputs), f"{name}.bias": drawn(outputs)}

        def norm(name: str) -> _Weights:
            return {f"{name}.weight": 1 + drawn(EMBEDDING), f"{name}.bias": drawn(EMBEDDING)}

        weights = {
            "token_embd.weight": drawn(len(TOKENS), EMBEDDING) * 8,
            "token_types.weight": drawn(2, EMBEDDING),
            **norm("token_embd_norm"),
        }
        if not self._is_nomic:
            weights["position_embd.weight"] = drawn(CONTEXT, EMBEDDING) * 4
        for layer in range(LAYERS):
            for part in ("attn_q", "attn_k", "attn_v", "attn_output"):
                weights |= linear(f"blk.{layer}.{part}", EMBEDDING, EMBEDDING)
            if self._is_nomic:
                for part in ("gate", "up"):
                    weights[f"blk.{layer}.ffn_{part}.weight"] = drawn(INNER, EMBEDDING)
                weights[f"blk.{layer}.ffn_down.weight"] = drawn(EMBEDDING, INNER)
            else:
                weights |= linear(f"blk.{layer}.ffn_up", INNER, EMBEDDING)
                weights |= linear(f"blk.{layer}.ffn_down", EMBEDDING, INNER)
            weights |= norm(f"blk.{layer}.attn_output_norm") | norm(f"blk.{layer}.layer_output_norm")
        if self.labels:
            weights |= linear("cls", EMBEDDING, EMBEDDING) | linear("cls.output", self.labels, EMBEDDING)
        return weights


def _linear(rows: NDArray[np.float64], weights: _Weights, name: str) -> NDArray[np.float64]:
    return rows @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]


def _normalized(rows: NDArray[np.float64], weights: _Weights, name: str) -> NDArray[np.float64]:
    deviation = np.sqrt(rows.var(axis=-1, keepdims=True) + _EPSILON)
    normal: NDArray[np.float64] = (rows - rows.mean(axis=-1, keepdims=True)) / deviation
    return normal * weights[f"{name}.weight"] + weights[f"{name}.bias"]


def _heads(rows: NDArray[np.float64]) -> NDArray[np.float64]:
    return rows.reshape(len(rows), HEADS, _HEAD).transpose(1, 0, 2)


def _rotated(heads: NDArray[np.float64]) -> NDArray[np.float64]:
    """Rotate each pair of numbers, half a head apart, by an angle that grows with the position."""
    angles = np.outer(np.arange(heads.shape[1]), _ROTATION_BASE ** (-np.arange(_HEAD // 2) / (_HEAD // 2)))
    first, second = heads[..., : _HEAD // 2], heads[..., _HEAD // 2 :]
    sine, cosine = np.sin(angles), np.cos(angles)
    return np.concatenate([first * cosine - second * sine, first * sine + second * cosine], axis=-1)


def _gelu(numbers: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the approximation by a hyperbolic tangent, which llama.cpp computes too."""
    inner = np.sqrt(2 / np.pi) * (numbers + 0.044715 * numbers**3)
    gated: NDArray[np.float64] = 0.5 * numbers * (1 + np.tanh(inner))
    return gated
