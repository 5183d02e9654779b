"""The prefix tree against a model that keeps lists of tokens and of cells for each sequence.

There are only two tokens, and few and short sequences, so that they share, split and collide all the time.
"""

import itertools
import random
from collections.abc import Iterable
from collections.abc import Sequence as Run
from dataclasses import dataclass, field

import pytest

from caravan_scheduler.prefix_tree import NO_MATCH, Match, PrefixTree

NAMESPACES = ("", "tenant")


def common(left: Run[int], right: Run[int]) -> int:
    """Return how many first elements are equal."""
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(left, right, strict=False)))


@dataclass
class Holder:
    """What one sequence holds: tokens, and for each the number of its cell."""

    namespace: str
    tokens: list[int] = field(default_factory=list)
    cells: list[int] = field(default_factory=list)
    parked: bool = False


@dataclass
class Model:
    """What the tree should answer, in the plainest form."""

    holders: dict[int, Holder] = field(default_factory=dict)
    taken: int = 0

    def insert(self, sequence_id: int, namespace: str) -> None:
        self.holders[sequence_id] = Holder(namespace)

    def fork(self, sequence_id: int, source_id: int, length: int) -> None:
        source = self.holders[source_id]
        self.holders[sequence_id] = Holder(source.namespace, source.tokens[:length], source.cells[:length])

    def extend(self, sequence_id: int, tokens: list[int]) -> None:
        holder = self.holders[sequence_id]
        holder.tokens += tokens
        holder.cells += range(self.taken, self.taken + len(tokens))
        self.taken += len(tokens)

    def truncate(self, sequence_id: int, length: int) -> None:
        holder = self.holders[sequence_id]
        del holder.tokens[length:]
        del holder.cells[length:]

    def remove(self, sequence_id: int) -> None:
        del self.holders[sequence_id]

    def park(self, sequence_id: int) -> None:
        self.holders[sequence_id].parked = True

    def revive(self, sequence_id: int, length: int) -> None:
        self.truncate(sequence_id, length)
        self.holders[sequence_id].parked = False

    def live(self) -> set[int]:
        return {sequence_id for sequence_id, holder in self.holders.items() if not holder.parked}

    def cells_of(self, sequence_ids: Iterable[int]) -> int:
        return len({cell for sequence_id in sequence_ids for cell in self.holders[sequence_id].cells})

    def own_cells(self, sequence_ids: set[int]) -> int:
        """Return how many cells only these sequences hold."""
        return self.cells_of(self.holders) - self.cells_of(self.holders.keys() - sequence_ids)

    def shared_cells(self, cells: list[int], sequence_ids: Iterable[int]) -> int:
        """Return how many first ``cells`` one of these sequences holds too."""
        return max((common(cells, self.holders[sequence_id].cells) for sequence_id in sequence_ids), default=0)

    def longest(self, namespace: str, tokens: list[int]) -> int:
        """Return the length of the longest prefix of ``tokens`` that any holder has."""
        held = (common(tokens, holder.tokens) for holder in self.holders.values() if holder.namespace == namespace)
        return max(held, default=0)

    def longest_whole(self, namespace: str, tokens: list[int]) -> int:
        """Return the length of the longest parked sequence that is a prefix of ``tokens``."""
        return max(
            (
                len(holder.tokens)
                for holder in self.holders.values()
                if holder.parked and holder.namespace == namespace and tokens[: len(holder.tokens)] == holder.tokens
            ),
            default=0,
        )


class Comparison:
    """A tree and a model that get the same operations."""

    def __init__(self, seed: int, sequences: int, longest: int) -> None:
        self.rng = random.Random(seed)
        self.sequences = sequences
        self.longest = longest
        self.tree = PrefixTree()
        self.model = Model()

    def some_tokens(self, most: int) -> list[int]:
        return self.rng.choices((0, 1), k=self.rng.randint(0, max(0, most)))

    def some_prompt(self) -> list[int]:
        """Return a prompt, mostly one with a prefix that a holder has."""
        holders = list(self.model.holders.values())
        begun = self.rng.choice(holders).tokens if holders and self.rng.random() < 0.7 else []
        return begun[: self.rng.randint(0, self.longest)] + self.some_tokens(4)

    def change(self) -> None:
        """Apply one random operation to both."""
        rng, model = self.rng, self.model
        held = list(model.holders)
        unused = [sequence_id for sequence_id in range(self.sequences) if sequence_id not in model.holders]
        if unused and rng.random() < 0.3:
            sequence_id = rng.choice(unused)
            if held and rng.random() < 0.7:
                source_id = rng.choice(held)
                self._both("fork", sequence_id, source_id, rng.randint(0, len(model.holders[source_id].tokens)))
            else:
                self._both("insert", sequence_id, rng.choice(NAMESPACES))
            return
        if not held:
            return
        sequence_id = rng.choice(held)
        holder = model.holders[sequence_id]
        length = len(holder.tokens)
        match rng.choice(("extend", "extend", "extend", "truncate", "remove", "park", "revive")):
            case "extend":
                self._both("extend", sequence_id, self.some_tokens(min(4, self.longest - length)))
            case "truncate":
                self._both("truncate", sequence_id, rng.randint(0, length))
            case "remove":
                self._both("remove", sequence_id)
            case "park" if not holder.parked:
                self._both("park", sequence_id)
            case "revive" if holder.parked:
                self._both("revive", sequence_id, rng.randint(0, length))

    def _both(self, name: str, *arguments: object) -> None:
        getattr(self.tree, name)(*arguments)
        getattr(self.model, name)(*arguments)

    def check_cells(self) -> None:
        """Check that each cell counts once, whoever shares it."""
        holders = self.model.holders
        for sequence_id in range(self.sequences):
            assert (sequence_id in self.tree) == (sequence_id in holders)
        for sequence_id, holder in holders.items():
            assert self.tree.length(sequence_id) == len(holder.tokens)
        assert self.tree.cells == self.model.cells_of(holders)
        assert self.tree.live_cells == self.model.cells_of(self.model.live())

    def check_own_cells(self) -> None:
        """Check how many cells removing some sequences would free."""
        holders = list(self.model.holders)
        chosen = set(self.rng.sample(holders, self.rng.randint(0, min(3, len(holders)))))
        assert self.tree.own_cells(chosen) == self.model.own_cells(chosen)

    def check_match(self) -> None:
        """Check that the longest prefix is found, with all its sources and its live part."""
        namespace, tokens = self.rng.choice(NAMESPACES), self.some_prompt()
        most = self.rng.randint(0, len(tokens))
        found = self.tree.match(namespace, tokens, most)
        assert found.length == self.model.longest(namespace, tokens[:most])
        if not found.length:
            assert found == NO_MATCH
            return
        cells = self._check_sources(found, tokens)
        assert set(found.sources) == {
            sequence_id
            for sequence_id, holder in self.model.holders.items()
            if holder.cells[: found.length] == cells and holder.namespace == namespace
        }

    def check_match_whole(self) -> None:
        """Check that the longest parked sequence that is a prefix is found, and nothing else."""
        namespace, tokens = self.rng.choice(NAMESPACES), self.some_prompt()
        most = self.rng.randint(0, len(tokens))
        found = self.tree.match_whole(namespace, tokens, most)
        assert found.length == self.model.longest_whole(namespace, tokens[:most])
        if not found.length:
            assert found == NO_MATCH
            return
        self._check_sources(found, tokens)
        for sequence_id in found.sources:
            assert self.model.holders[sequence_id].parked
            assert len(self.model.holders[sequence_id].tokens) == found.length

    def _check_sources(self, found: Match, tokens: list[int]) -> list[int]:
        """Check that sources hold the same tokens in the same cells. Return these cells."""
        assert len(set(found.sources)) == len(found.sources) > 0
        holders = [self.model.holders[sequence_id] for sequence_id in found.sources]
        cells = holders[0].cells[: found.length]
        for holder in holders:
            assert holder.tokens[: found.length] == tokens[: found.length]
            assert holder.cells[: found.length] == cells
        assert found.live_length == self.model.shared_cells(cells, self.model.live())
        return cells


SIZES = pytest.mark.parametrize(
    ("seed", "sequences", "longest"), [(1, 2, 6), (2, 4, 6), (3, 6, 12), (4, 10, 8), (5, 10, 24)]
)


@SIZES
def test_the_tree_knows_what_the_model_knows(seed: int, sequences: int, longest: int) -> None:
    both = Comparison(seed, sequences, longest)
    for _ in range(30_000):
        both.change()
        both.check_cells()
        both.check_own_cells()
        both.check_match()
    for sequence_id in list(both.model.holders):
        both.tree.remove(sequence_id)
    assert both.tree.cells == both.tree.live_cells == 0


@SIZES
def test_the_longest_whole_sequence_is_found(seed: int, sequences: int, longest: int) -> None:
    both = Comparison(seed, sequences, longest)
    for _ in range(30_000):
        both.change()
        both.check_match_whole()
