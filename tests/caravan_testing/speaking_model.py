"""Writes a llama that says known texts: which one, a word of the prompt decides.

All pieces of all texts are tokens of their own, and each knows the next one. The last token of a prompt is no such
piece: there the output follows what attention, the mean of all tokens before, has heard of the words in the prompt. So
every server says the same, whatever its template makes of a conversation.
"""

from collections.abc import Sequence
from pathlib import Path
from random import Random

import numpy as np
from gguf import GGUFWriter, TokenType

_CONTEXT = 32_768
_HEAD = 64
# Shorter pieces would be among the tokens of prompts.
_SHORTEST, _LONGEST = 3, 9
_CONTROLS = ("<|begin-of-text|>", "<|end-of-text|>")


def cue(number: int) -> str:
    """Return the word that makes the model say text ``number``."""
    return f"qzcue{number}q"


def write_speaking_model(path: Path, texts: Sequence[str], template: str) -> Path:
    """Write a GGUF with ``template`` that says ``texts``, each of at least three characters."""
    pieces = _unique_pieces(texts)
    bytes_ = _byte_characters()
    said = [piece for text in pieces for piece in text]
    cues = [cue(number) for number in range(len(texts))]
    tokens = [*_CONTROLS, *(bytes_[byte] for byte in range(256)), *cues]
    tokens += ["".join(bytes_[byte] for byte in piece.encode()) for piece in said]
    first_cue, first_piece = len(_CONTROLS) + 256, len(_CONTROLS) + 256 + len(cues)
    types = [TokenType.CONTROL] * len(_CONTROLS) + [TokenType.NORMAL] * 256
    types += [TokenType.USER_DEFINED] * len(cues) + [TokenType.NORMAL] * len(said)

    # Dimensions: one for each piece, then one for each cue as it is, one for each as it is heard, one for other tokens.
    raw, heard, other = len(said), len(said) + len(cues), len(said) + 2 * len(cues)
    size = -(-(other + 1) // _HEAD) * _HEAD
    embedding = np.zeros((len(tokens), size), np.float32)
    embedding[:first_cue, other] = 1.0
    value, output = np.zeros((size, size), np.float32), np.zeros((len(tokens), size), np.float32)
    for number in range(len(cues)):
        embedding[first_cue + number, raw + number] = 1.0
        value[heard + number, raw + number] = 0.01
    end_of_text, place = 1, 0
    for number, text in enumerate(pieces):
        output[first_piece + place, heard + number] = 1000.0
        for left in reversed(range(len(text))):
            embedding[first_piece + place, place] = 1.0
            output[first_piece + place + 1 if left else end_of_text, place] = 100.0
            place += 1
    _write(path, tokens, types, template, {"token_embd": embedding, "output": output, "attn_v": value})
    return path


def _write(
    path: Path, tokens: list[str], types: list[TokenType], template: str, weights: dict[str, np.ndarray]
) -> None:
    size = weights["output"].shape[1]
    writer = GGUFWriter(path, "llama")
    writer.add_context_length(_CONTEXT)
    writer.add_embedding_length(size)
    writer.add_feed_forward_length(_HEAD)
    writer.add_head_count(size // _HEAD)
    writer.add_block_count(1)
    writer.add_rope_dimension_count(_HEAD)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    # At least one is wanted. Its bytes are in no text.
    bytes_ = _byte_characters()
    writer.add_token_merges([f"{bytes_[0]} {bytes_[1]}"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_add_bos_token(False)
    writer.add_chat_template(template)
    zeros, ones = np.zeros((size, size), np.float32), np.ones(size, np.float32)
    tensors = {
        "token_embd.weight": weights["token_embd"],
        "output_norm.weight": ones,
        "output.weight": weights["output"],
        "blk.0.attn_norm.weight": ones,
        # All tokens count alike.
        "blk.0.attn_q.weight": zeros,
        "blk.0.attn_k.weight": zeros,
        "blk.0.attn_v.weight": weights["attn_v"],
        "blk.0.attn_output.weight": np.eye(size, dtype=np.float32),
        "blk.0.ffn_norm.weight": ones,
        "blk.0.ffn_gate.weight": np.zeros((_HEAD, size), np.float32),
        "blk.0.ffn_up.weight": np.zeros((_HEAD, size), np.float32),
        "blk.0.ffn_down.weight": np.zeros((size, _HEAD), np.float32),
    }
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _unique_pieces(texts: Sequence[str]) -> list[list[str]]:
    """Cut each text into pieces, of which none is twice in all texts: tokens of a vocabulary differ."""
    random = Random(0)
    taken: set[str] = set()
    return [_cut(text, random, taken) for text in texts]


def _cut(text: str, random: Random, taken: set[str]) -> list[str]:
    pieces: list[str] = []
    at = 0
    while at < len(text):
        length = random.randint(_SHORTEST, _LONGEST)
        while text[at : at + length] in taken and at + length < len(text):
            length += 1
        if len(text) - at - length < _SHORTEST:
            length = len(text) - at
        piece = text[at : at + length]
        while piece in taken and pieces:
            # The end of another text: it grows to the left.
            piece = pieces.pop() + piece
        assert piece not in taken, f"the text {text!r} is there twice"
        pieces.append(piece)
        taken.add(piece)
        at += length
    return pieces


def _byte_characters() -> list[str]:
    """Return the character that stands for each byte in GPT-2's vocabularies."""
    shown = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    hidden = iter(range(256, 512))
    return [chr(byte) if byte in shown else chr(next(hidden)) for byte in range(256)]
