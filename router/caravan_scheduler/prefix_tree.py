"""Which sequences of a shard hold which tokens: a radix tree whose nodes are runs of cells."""

import itertools
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

from caravan_scheduler.core.tokens import common_length


@dataclass(slots=True, eq=False)
class _Node:
    """A run of cells, one for each token. It exists as long as a sequence ends in it or below it.

    ``start``: position of its first token. ``live``: number of live sequences that end in it or below it.
    """

    parent: "_Node | None"
    tokens: list[int]
    start: int
    live: int = 0
    # By first token. Lists, since sequences that computed the same tokens apart hold different cells.
    children: dict[int, list["_Node"]] = field(default_factory=dict)
    ends: set[int] = field(default_factory=set)

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)


@dataclass(frozen=True, slots=True)
class Match:
    """The longest prefix of some tokens that is in the tree.

    ``sources``: the sequences that hold all of it. ``live_length``: how much of it live sequences hold; one more holder
    of that takes no further cells. ``within``: the sequences that hold a beginning of the tokens, and nothing else.
    """

    length: int = 0
    live_length: int = 0
    sources: tuple[int, ...] = ()
    within: tuple[int, ...] = field(default=(), compare=False)


NO_MATCH = Match()


@dataclass(frozen=True, slots=True)
class Run:
    """A run of cells, told to those who watch: the place of the run before it, -1 for none, and who ends in it."""

    parent: int
    cells: int
    ends: tuple[int, ...]


@dataclass(slots=True)
class _Descent:
    """The farthest ``node`` reached, at ``length`` tokens. ``complete``: the nodes that were followed to their end."""

    length: int = 0
    node: _Node | None = None
    complete: list[_Node] = field(default_factory=list)


class PrefixTree:
    """Paths of tokens, from one root for each namespace. Sequences are live or parked; both may be sources.

        root -- "You are a" --+-- " helpful" (3, parked)
                              +-- " pirate" --+-- "." (5, live)
                                              +-- "!" (7, live)

    ``cells`` counts every token of the tree once, ``live_cells`` those on the paths of live sequences. Evicting parked
    sequences gives back the rest.
    """

    def __init__(self) -> None:
        self._roots: dict[str, _Node] = {}
        self._leaf: dict[int, _Node] = {}
        self._parked: set[int] = set()
        self.cells = 0
        self.live_cells = 0
        # Counts the changes, so that what was found can be kept until the next one.
        self.version = 0

    def __contains__(self, sequence_id: int) -> bool:
        return sequence_id in self._leaf

    def length(self, sequence_id: int) -> int:
        """Return the number of tokens that ``sequence_id`` holds."""
        return self._leaf[sequence_id].end

    def token(self, sequence_id: int, position: int) -> int | None:
        """Return the token that ``sequence_id`` holds at ``position``; None if it holds fewer."""
        node = self._leaf[sequence_id]
        if position >= node.end:
            return None
        while node.start > position:
            assert node.parent is not None
            node = node.parent
        return node.tokens[position - node.start]

    def has_behind(self, sequence_id: int, token: int) -> bool:
        """Whether others hold all that ``sequence_id`` does, and then ``token``."""
        return token in self._leaf[sequence_id].children

    def own_cells(self, sequence_ids: Collection[int]) -> int:
        """Cells that only these sequences hold."""
        own: set[_Node] = set()
        open_nodes = [self._leaf[sequence_id] for sequence_id in sequence_ids]
        while open_nodes:
            node = open_nodes.pop()
            below = (child for siblings in node.children.values() for child in siblings)
            if node.parent is not None and node.ends <= set(sequence_ids) and own.issuperset(below):
                own.add(node)
                open_nodes.append(node.parent)
        return sum(len(node.tokens) for node in own)

    # Sequences

    def insert(self, sequence_id: int, namespace: str) -> None:
        """Add a live sequence that holds nothing."""
        self.version += 1
        assert sequence_id not in self._leaf, f"sequence {sequence_id} is in the tree"
        root = self._roots.get(namespace)
        if root is None:
            root = self._roots[namespace] = _Node(None, [], 0)
        self._end_in(root, sequence_id)
        root.live += 1

    def fork(self, sequence_id: int, source_id: int, length: int) -> None:
        """Add a live sequence that holds the first ``length`` tokens of another, in the same cells."""
        self.version += 1
        assert sequence_id not in self._leaf, f"sequence {sequence_id} is in the tree"
        node = self._node_ending_at(self._leaf[source_id], length)
        self._end_in(node, sequence_id)
        self._count_live(node, 1)

    def extend(self, sequence_id: int, tokens: Sequence[int]) -> None:
        """Append ``tokens``, which the sequence computed in cells of its own."""
        if not tokens:
            return
        self.version += 1
        leaf = self._leaf[sequence_id]
        live = sequence_id not in self._parked
        if leaf.parent is None or leaf.children or len(leaf.ends) > 1:
            leaf.ends.remove(sequence_id)
            child = _Node(leaf, [], leaf.end, live=int(live))
            leaf.children.setdefault(tokens[0], []).append(child)
            self._end_in(child, sequence_id)
            leaf = child
        leaf.tokens.extend(tokens)
        self.cells += len(tokens)
        if live:
            self.live_cells += len(tokens)

    def truncate(self, sequence_id: int, length: int) -> None:
        """Give up what a sequence holds beyond ``length`` tokens."""
        self.version += 1
        old = self._leaf[sequence_id]
        if length == old.end:
            return
        live = sequence_id not in self._parked
        node = self._node_ending_at(old, length)
        old.ends.remove(sequence_id)
        self._end_in(node, sequence_id)
        if live:
            self._count_live(old, -1)
            self._count_live(node, 1)
        self._prune(old)

    def remove(self, sequence_id: int) -> None:
        """Give up all that a sequence holds."""
        self.version += 1
        leaf = self._leaf.pop(sequence_id)
        leaf.ends.remove(sequence_id)
        if sequence_id in self._parked:
            self._parked.remove(sequence_id)
        else:
            self._count_live(leaf, -1)
        self._prune(leaf)

    def park(self, sequence_id: int) -> None:
        """Make a live sequence a parked one, which others may start from until it is removed."""
        self.version += 1
        assert sequence_id not in self._parked, f"sequence {sequence_id} is parked"
        self._parked.add(sequence_id)
        self._count_live(self._leaf[sequence_id], -1)

    def revive(self, sequence_id: int, length: int) -> None:
        """Make a parked sequence a live one that holds only its first ``length`` tokens."""
        self.version += 1
        self._parked.remove(sequence_id)
        self._count_live(self._leaf[sequence_id], 1)
        self.truncate(sequence_id, length)

    # Questions

    def match(self, namespace: str, tokens: Sequence[int], most: int) -> Match:
        """Return the longest common prefix of the first ``most`` tokens with any path."""
        found = self._descend(namespace, tokens, most)
        if found.node is None:
            return NO_MATCH
        sources = tuple(_sequences_below(found.node))
        within = tuple(key for node in found.complete for key in node.ends)
        return Match(found.length, self._live_length(found.node, found.length), sources, within)

    def nearest(self, namespace: str, tokens: Sequence[int], most: int) -> tuple[int, tuple[int, ...]]:
        """Return the length of the longest prefix of ``tokens`` that is there, and ``most`` sequences that hold it.

        Those that end soonest come first.
        """
        found = self._descend(namespace, tokens, len(tokens))
        if found.node is None:
            return 0, ()
        return found.length, tuple(itertools.islice(_sequences_below(found.node), most))

    def match_whole(self, namespace: str, tokens: Sequence[int], most: int) -> Match:
        """Return the longest parked sequence that is a prefix of ``tokens``: for memory that cannot be cut back."""
        found = self._descend(namespace, tokens, most)
        whole = [node for node in found.complete if node.ends & self._parked]
        if not whole:
            return NO_MATCH
        node = max(whole, key=lambda node: node.end)
        return Match(node.end, self._live_length(node, node.end), tuple(sorted(node.ends & self._parked)))

    def runs(self) -> list[Run]:
        """Return all runs, each after the one before it. A root has no cells, and is one if a sequence ends in it."""
        found: list[Run] = []
        open_nodes = [(root, -1) for root in self._roots.values()]
        while open_nodes:
            node, parent = open_nodes.pop()
            if node.tokens or node.ends:
                found.append(Run(parent, len(node.tokens), tuple(sorted(node.ends))))
                parent = len(found) - 1
            open_nodes += [(child, parent) for siblings in node.children.values() for child in siblings]
        return found

    # Nodes

    def _end_in(self, node: _Node, sequence_id: int) -> None:
        node.ends.add(sequence_id)
        self._leaf[sequence_id] = node

    def _count_live(self, leaf: _Node, change: int) -> None:
        node: _Node | None = leaf
        while node is not None:
            was = node.live
            node.live = was + change
            if (was == 0) != (node.live == 0):
                self.live_cells += len(node.tokens) if was == 0 else -len(node.tokens)
            node = node.parent

    def _node_ending_at(self, leaf: _Node, length: int) -> _Node:
        """Return the node on the path to ``leaf`` that ends at ``length``. Split one if there is none."""
        assert 0 <= length <= leaf.end, f"{length} of {leaf.end} tokens"
        node = leaf
        while node.parent is not None and node.start >= length:
            node = node.parent
        if node.end == length:
            return node
        # The upper part is new; the lower one stays the node that sequences and children know.
        parent = node.parent
        assert parent is not None
        cut = length - node.start
        upper = _Node(parent, node.tokens[:cut], node.start, live=node.live)
        siblings = parent.children[node.tokens[0]]
        siblings[siblings.index(node)] = upper
        node.tokens = node.tokens[cut:]
        node.start = length
        node.parent = upper
        upper.children[node.tokens[0]] = [node]
        return upper

    def _prune(self, node: _Node) -> None:
        """Remove ``node`` and nodes above it in or below which no sequence ends."""
        while node.parent is not None and not node.ends and not node.children:
            parent = node.parent
            siblings = parent.children[node.tokens[0]]
            siblings.remove(node)
            if not siblings:
                del parent.children[node.tokens[0]]
            self.cells -= len(node.tokens)
            node = parent
        if node.parent is not None:
            self._join_only_child(node, node.parent)
        elif not node.ends and not node.children:
            self._roots = {name: root for name, root in self._roots.items() if root is not node}

    def _join_only_child(self, node: _Node, parent: _Node) -> None:
        """Undo a split at the end of ``node`` that no sequence needs, so that paths stay short."""
        if node.ends or len(node.children) != 1:
            return
        (children,) = node.children.values()
        if len(children) != 1:
            return
        (child,) = children
        siblings = parent.children[node.tokens[0]]
        siblings[siblings.index(node)] = child
        child.tokens = node.tokens + child.tokens
        child.start = node.start
        child.parent = parent

    def _descend(self, namespace: str, tokens: Sequence[int], most: int) -> "_Descent":
        """Follow the first ``most`` of ``tokens`` as far as they are there."""
        found = _Descent()
        most = min(most, len(tokens))
        root = self._roots.get(namespace)
        open_nodes = [] if root is None else [root]
        while open_nodes:
            node = open_nodes.pop()
            end = node.end
            if end >= most:
                continue
            for child in node.children.get(tokens[end], ()):
                length = end + common_length(child.tokens, list(tokens[end : min(child.end, most)]))
                if length > found.length or (length == found.length and _is_held_anyway(child, found.node)):
                    found.length, found.node = length, child
                if length == child.end:
                    found.complete.append(child)
                    open_nodes.append(child)
        return found

    def _live_length(self, node: _Node, length: int) -> int:
        at: _Node | None = node
        while at is not None and at.parent is not None:
            if at.live:
                return min(at.end, length)
            at = at.parent
        return 0


def _is_held_anyway(child: _Node, than: _Node | None) -> bool:
    """Whether ``child`` is live, unlike another node with the same tokens, so that using it takes no further cells."""
    return than is not None and child.live > 0 and than.live == 0


def _sequences_below(node: _Node) -> Iterator[int]:
    """Yield the sequences that end in ``node`` or below, nearest first. Nodes are visited as they are needed."""
    yield from sorted(node.ends)
    level = [node]
    while level:
        below: list[_Node] = []
        for at in level:
            for children in at.children.values():
                for child in children:
                    if child.ends:
                        yield from sorted(child.ends)
                    below.append(child)
        level = below
