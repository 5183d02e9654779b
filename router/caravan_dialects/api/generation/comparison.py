"""Compares requests with earlier ones of the same API key, for clients that ask why a prompt was not in the cache.

Of the earlier requests only hashes are kept. Python's hashes of bytes differ from process to process.
"""

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from caravan_dialects.api.generation.schema import FirstDifference
from caravan_scheduler.core.tokens import block_hashes, common_length
from caravan_scheduler.prefix_keys import BLOCK_TOKENS

# Chat templates write the beginning of the answer otherwise than the answer when it is history.
_BEGINNING_TOKENS = 2 * BLOCK_TOKENS
# Most requests that are remembered of a key, and most keys.
_MOST_REQUESTS = 128
_MOST_KEYS = 256
_ENCODER = msgspec.json.Encoder()


def hash_of(value: Any) -> int:
    """Return a hash of a part of a body."""
    return hash(_ENCODER.encode(value))


@dataclass(frozen=True, slots=True, kw_only=True)
class Fingerprint:
    """Hashes of a request. ``parts``: of what decides its prompt besides its messages, by the name of the part.

    ``messages``: of each message. ``blocks``: of the whole blocks of its prompt, which has so many ``tokens``.
    """

    parts: Mapping[str, int]
    messages: tuple[int, ...]
    tokens: int
    blocks: list[int]


def fingerprint_of(parts: Mapping[str, Any], messages: Iterable[Any], prompt: tuple[int, ...]) -> Fingerprint:
    """Return the hashes of a request."""
    return Fingerprint(
        parts={name: hash_of(part) for name, part in parts.items()},
        messages=tuple(map(hash_of, messages)),
        tokens=len(prompt),
        blocks=block_hashes(prompt, BLOCK_TOKENS),
    )


@dataclass(frozen=True, slots=True)
class Divergence:
    """``part``: the first part of a request that has changed, "messages" for its messages; "" if none has.

    ``earlier`` and ``later``: tokens of both prompts behind their common beginning, ``common``.
    """

    part: str
    at: FirstDifference
    common: int
    earlier: int
    later: int


def divergence(earlier: Fingerprint, later: Fingerprint) -> Divergence | None:
    """Return where the prompt of ``later`` leaves that of ``earlier``; None if it goes on behind it.

    Parts are compared in their order. A change that changes no token is none, but for that of the part "model", which
    is not compared by tokens.
    """
    common = BLOCK_TOKENS * common_length(earlier.blocks, later.blocks)
    changed = [name for name, part in later.parts.items() if earlier.parts.get(name) != part]
    other_model = "model" in changed
    if other_model:
        common = 0
    elif common == BLOCK_TOKENS * len(earlier.blocks):
        return None
    message = common_length(earlier.messages, later.messages)
    part = changed[0] if changed else "messages" if message < len(earlier.messages) else ""
    if not part and earlier.tokens - common < _BEGINNING_TOKENS:
        return None
    at = FirstDifference(common, message if part == "messages" else None)
    return Divergence(part, at, common, earlier.tokens - common, later.tokens - common)


class RememberedRequests:
    """The hashes of the requests that were made last, by API key and by the id of the reply."""

    def __init__(self) -> None:
        # Least recently used first.
        self._keys: OrderedDict[str, OrderedDict[str, Fingerprint]] = OrderedDict()

    def remember(self, owner: str, reply_id: str, fingerprint: Fingerprint) -> None:
        """Remember the request that the reply of this id answers. ``owner``: the name of its API key."""
        replies = self._keys.setdefault(owner, OrderedDict())
        self._keys.move_to_end(owner)
        replies[reply_id] = fingerprint
        if len(replies) > _MOST_REQUESTS:
            replies.popitem(last=False)
        if len(self._keys) > _MOST_KEYS:
            self._keys.popitem(last=False)

    def find(self, owner: str, reply_id: str) -> Fingerprint | None:
        """Return the hashes of a request of this key; None if they are not remembered."""
        replies = self._keys.get(owner)
        return None if replies is None else replies.get(reply_id)
