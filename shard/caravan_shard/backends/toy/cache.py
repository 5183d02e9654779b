"""The toy model's KV cache: it gives out cells as llama.cpp does, and refuses what llama.cpp refuses."""

from dataclasses import dataclass, field
from functools import cache
from hashlib import blake2b

from caravan_proto.messages.limits import KvLayout

_MASK = (1 << 64) - 1
EMPTY_STATE = 0x9E3779B97F4A7C15


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
