"""The toy model: 256 byte tokens and four control tokens. Its logits are a fixed function of all tokens before.

Its KV cache gives out cells as llama.cpp does, and refuses what llama.cpp refuses.
"""

from dataclasses import dataclass, field
from functools import cache
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from caravan_proto.messages.limits import KvLayout
from caravan_proto.messages.model import FillTokens, ModelFile
from caravan_shard.arrays import Floats
from caravan_shard.backends.base import ModelUsers, Piece

BOS = 256
EOS = 257
TURN_START = 258
TURN_END = 259
SPECIAL_TEXTS = {BOS: "<s>", EOS: "</s>", TURN_START: "<|im_start|>", TURN_END: "<|im_end|>"}
VOCABULARY_SIZE = 260

# Rows of logits that there are.
_ROWS = 4096

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

TOY_FACTS = ModelFile(
    name="toy",
    fingerprint="toy-1",
    vocabulary_size=VOCABULARY_SIZE,
    vocabulary_fingerprint="toy-vocabulary",
    trained_context=1 << 20,
    chat_template=CHAT_TEMPLATE,
    bos_text="<s>",
    eos_text="</s>",
    eos_token_ids=frozenset({EOS, TURN_END}),
    architecture="toy",
    parameter_count=_ROWS * VOCABULARY_SIZE,
    weight_bytes=_ROWS * VOCABULARY_SIZE * 4,
    quantization="F32",
    device_bytes=0,
    metadata=(
        ("general.architecture", "toy"),
        ("general.file_type", 0),
        ("tokenizer.ggml.add_bos_token", True),
        ("toy.context_length", 1 << 20),
        ("toy.vocab_size", VOCABULARY_SIZE),
    ),
    # ASCII's separators of groups, records and units.
    fill=FillTokens(prefix=0x1D, suffix=0x1E, middle=0x1F, begin=BOS),
)

_MASK = (1 << 64) - 1
EMPTY_STATE = 0x9E3779B97F4A7C15


def _logit_table() -> Floats:
    """Return [rows, vocabulary]. Likely tokens are printable ASCII; one in 130 greedy tokens is an end token."""
    table = np.random.Generator(np.random.Philox(key=2)).standard_normal((_ROWS, VOCABULARY_SIZE), np.float32) * 2
    table[:, :32] -= 12
    table[:, 127:256] -= 12
    table[:, [BOS, TURN_START, TURN_END]] -= 12
    table[:, EOS] -= 0.4
    return table


_TABLE = _logit_table()


def toy_logits(states: NDArray[np.uint64]) -> Floats:
    """Return the logits [rows, vocabulary] after ``states`` [rows]."""
    logits: Floats = _TABLE[states % np.uint64(_ROWS)]
    return logits


class ToyVocabulary:
    """A Vocabulary: a token per UTF-8 byte, and the control tokens."""

    def __init__(self) -> None:
        self.users = ModelUsers()
        self._pieces = [Piece(bytes([byte]), special=False) for byte in range(256)]
        self._pieces += [Piece(SPECIAL_TEXTS[token].encode(), special=True) for token in sorted(SPECIAL_TEXTS)]

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        """Return BOS if ``add_special``, then a token per byte."""
        tokens = [BOS] if add_special else []
        start = 0
        while start < len(text):
            found = [(text.find(name, start), token) for token, name in SPECIAL_TEXTS.items()] if parse_special else []
            at, token = min((pair for pair in found if pair[0] >= 0), default=(len(text), -1))
            tokens.extend(text[start:at].encode())
            if token < 0:
                break
            tokens.append(token)
            start = at + len(SPECIAL_TEXTS[token])
        return tokens

    def pair(self, query: str, document: str) -> list[int]:
        """Return BOS, the query, EOS and the document."""
        return [BOS, *query.encode(), EOS, *document.encode()]

    def piece(self, token: int) -> Piece:
        """Return the byte, or the text of the control token."""
        return self._pieces[token]

    def pieces(self) -> list[Piece]:
        """Return all pieces."""
        return list(self._pieces)


@cache
def adapter_salt(adapter: str) -> int:
    """Return the number that an adapter mixes into every state; 0 without an adapter."""
    return int.from_bytes(blake2b(adapter.encode(), digest_size=8).digest()) if adapter else 0


def next_state(state: int, token: int, position: int, adapter: str = "") -> int:
    """Return the 64-bit state after a token; it depends on every token so far and on the position of each."""
    mixed = (
        state ^ adapter_salt(adapter) ^ (token + 1) * 0xBF58476D1CE4E5B9 ^ (position + 1) * 0x94D049BB133111EB
    ) & _MASK
    mixed = (mixed ^ mixed >> 29) * 0xD6E8FEB86659FD93 & _MASK
    return mixed ^ mixed >> 32


@dataclass(slots=True)
class _Cell:
    """The state after the token in this cell, and how many sequences hold the cell."""

    state: int
    holders: int = 1


@dataclass(slots=True)
class ToyCache:
    """The cells of each sequence, by sequence id, in order of position.

    ``computed``: how many tokens of each sequence the last step has computed, as far as none was taken back.
    """

    cells: int
    cells_per_sequence: int
    layout: KvLayout
    used: int = 0
    held: dict[int, list[_Cell]] = field(default_factory=dict)
    computed: dict[int, int] = field(default_factory=dict)

    def length(self, sequence_id: int) -> int:
        """Return how many tokens of the sequence are held."""
        return len(self.held.get(sequence_id, ()))

    def state(self, sequence_id: int) -> int:
        """Return the state after the last token held."""
        cells = self.held.get(sequence_id)
        return cells[-1].state if cells else EMPTY_STATE

    def has_room(self, new_tokens: dict[int, int]) -> bool:
        """Whether ``new_tokens``, a number of tokens by sequence id, fit."""
        if self.layout is KvLayout.UNIFIED:
            return self.used + sum(new_tokens.values()) <= self.cells
        return all(self.length(key) + count <= self.cells_per_sequence for key, count in new_tokens.items())

    def append(self, sequence_id: int, token: int, adapter: str = "") -> None:
        """Add a token at the next position."""
        cells = self.held.setdefault(sequence_id, [])
        cells.append(_Cell(next_state(cells[-1].state if cells else EMPTY_STATE, token, len(cells), adapter)))
        self.used += 1

    def trim(self, sequence_id: int, length: int) -> None:
        """Keep the first ``length`` tokens."""
        cells = self.held.get(sequence_id, [])
        for cell in cells[length:]:
            cell.holders -= 1
            self.used -= cell.holders == 0
        del cells[length:]

    def states(self, sequence_id: int, start: int, end: int) -> list[int]:
        """Return the states after the tokens [start, end)."""
        return [cell.state for cell in self.held[sequence_id][start:end]]

    def put_back(self, sequence_id: int, states: list[int]) -> bool:
        """Give the sequence more cells, with ``states``; False if there are not enough."""
        if not self.has_room({sequence_id: len(states)}):
            return False
        self.held.setdefault(sequence_id, []).extend(map(_Cell, states))
        self.used += len(states)
        return True

    def copy(self, source_id: int, destination_id: int, length: int) -> None:
        """Start a sequence with the first tokens of another: the same cells if unified, copies if split."""
        shared = self.held[source_id][:length]
        if self.layout is KvLayout.UNIFIED:
            for cell in shared:
                cell.holders += 1
        else:
            shared = [_Cell(cell.state) for cell in shared]
            self.used += length
        self.held[destination_id] = shared
