"""Responses that one connection keeps for itself, because they are not to be stored."""

from collections import Counter
from dataclasses import replace
from typing import Protocol

import msgspec

from caravan_dialects.conversations.nodes import START, Chain, Node, Position

# Of a token id in a tuple.
_TOKEN_BYTES = 32


class Room(Protocol):
    """The memory that a connection may take."""

    def grow(self, count: int) -> None:
        """Hold ``count`` bytes more. Raises `full` errors of its own."""
        ...

    def shrink(self, count: int) -> None:
        """Hold ``count`` bytes less."""
        ...


class LocalResponses:
    """The last responses of a connection, by id. Chains share the nodes that they have in common."""

    def __init__(self, room: Room, full: type[Exception] | tuple[type[Exception], ...], most: int = 64) -> None:
        """``full``: what ``room`` raises if no more fits. ``most``: responses that are kept at a time."""
        self._room = room
        self._full = full
        self._most = most
        # The oldest first.
        self._chains: dict[str, Chain] = {}
        self._uses: Counter[str] = Counter()
        self._sizes: dict[str, int] = {}

    def find(self, response_id: str) -> Chain | None:
        """Return the chain that ends with a response; None if it is not kept."""
        return self._chains.get(response_id)

    def keep(self, before: Chain, node: Node) -> None:
        """Keep the response ``node``, which continues ``before``. The oldest ones make room; else it is not kept."""
        size = before.size + sum(len(msgspec.json.encode(item)) for item in node.items)
        chain = Chain(
            position=Position(node=node.id, items=len(node.items)),
            nodes=(*(replace(one, response=b"", tokens=None) for one in before.nodes), replace(node, tokens=None)),
            size=size,
            tokens=node.tokens or before.tokens,
        )
        while len(self._chains) >= self._most:
            self._drop_oldest()
        while not self._take(chain):
            if not self._chains:
                return
            self._drop_oldest()
        self._chains[node.id] = chain

    def drop(self, response_id: str) -> None:
        """Forget a response, if it is kept."""
        chain = self._chains.pop(response_id, None)
        if chain is None:
            return
        freed = _bytes_beside_items(chain)
        for node in chain.nodes:
            self._uses[node.id] -= 1
            if not self._uses[node.id]:
                del self._uses[node.id]
                freed += self._sizes.pop(node.id)
        self._room.shrink(freed)

    def _drop_oldest(self) -> None:
        self.drop(next(iter(self._chains)))

    def _take(self, chain: Chain) -> bool:
        """Count the memory of ``chain``; return False if it does not fit."""
        sizes = {node.id: len(msgspec.json.encode(node.items)) for node in chain.nodes if node.id not in self._uses}
        try:
            self._room.grow(sum(sizes.values()) + _bytes_beside_items(chain))
        except self._full:
            return False
        self._sizes |= sizes
        self._uses.update(node.id for node in chain.nodes)
        return True


def _bytes_beside_items(chain: Chain) -> int:
    tokens = 0 if chain.tokens is None else len(chain.tokens.token_ids)
    return _TOKEN_BYTES * tokens + len(chain.nodes[-1].response)


def whole(before: Chain, node: Node) -> Node:
    """Return ``node`` with the items of ``before``, so that it can be stored without them."""
    earlier = before.items
    return replace(node, parent=START, items=(*earlier, *node.items), inputs=len(earlier) + node.inputs)
