"""Writes the whole state of a scheduler as plain values, with which a part of a recording begins.

A state is a table of nodes, each with a kind and what it holds. Numbers, texts, truth values and null stand for
themselves; a list of one number is the place of another node. So what is shared, and what refers to itself, stays so.
"""

import copy
import math
from array import array
from collections import Counter, OrderedDict, deque
from dataclasses import dataclass
from typing import Any

from caravan_proto.messages.commands import RunNote, SaveEntry
from caravan_scheduler.events import SavedRun
from caravan_scheduler.pins import Pin
from caravan_scheduler.prefix_keys import PrefixKeys, key_behind
from caravan_scheduler.scheduler import Scheduler
from caravan_scheduler.sequence import Sequence
from caravan_scheduler.shard.kept_run import KeptRun
from caravan_studio.recording.names import Names
from caravan_studio.recording.prefixes import namespace_of, with_adapter
from caravan_studio.recording.run_cells import RunCells
from caravan_studio.recording.state_classes import (
    CONTENTS,
    HASH_KEYS,
    HASHES,
    LEFT_OUT,
    MEDIA,
    MEDIA_KEYS,
    NAMES,
    NAMESPACE_KEYS,
    TENANT_KEYS,
    TENANTS,
    TOKEN_KEYS,
    TOKENS,
    fields_of,
    is_enum,
    is_named_tuple,
)

Node = list[Any]
Field = tuple[str, str]


@dataclass(frozen=True, slots=True)
class _Medium:
    """A medium as a key."""

    number: int


class StateWriter:
    """Writes one state, with ``names`` that are new in this part of the recording."""

    def __init__(self, names: Names, cells: RunCells) -> None:
        self._names = names
        self._cells = cells
        self._nodes: list[Node] = []
        # By identity. What has a place is kept alive by the state.
        self._places: dict[int, int] = {}
        self._kept: list[object] = []
        # Hashes of prefixes, each with a sequence that has the prefix, and which of its prefixes it is.
        self._hashes: dict[int, tuple[Sequence, int]] = {}
        # Values to be written when all sequences are known, and the lists for that.
        self._by_hash: list[tuple[Any, list[Any]]] = []
        # Pins, and what is written of them: fields, and tokens beside them.
        self._pins: list[tuple[Pin, dict[str, Any], list[int]]] = []
        # Keys of empty prefixes with which saved runs begin, and their numbers.
        self._roots: dict[bytes, int] = {}

    def write(self, scheduler: Scheduler) -> list[Node]:
        """Return the nodes of a scheduler, which is the first of them."""
        todo: list[tuple[int, object]] = []
        self._place(scheduler, todo)
        while todo or self._by_hash:
            while todo:
                place, value = todo.pop()
                if isinstance(value, Sequence):
                    for at, found in enumerate(value.prefix_hashes(value.known_tokens)):
                        self._hashes.setdefault(found, (value, at))
                self._nodes[place] = self._node(value, todo)
            for hashed, pairs in self._by_hash:
                pairs += self._hashed(hashed, todo)
            self._by_hash.clear()
        for pin, fields, told in self._pins:
            fields["namespace"] = self._namespace_of_pin(pin) or self._tell_pin(pin, scheduler, told)
        return self._nodes

    def _namespace_of_pin(self, pin: Pin) -> str | None:
        """Return the namespace with which the tokens of a pin have its key; None if none that is known has."""
        if pin.namespace is not None:
            return self._namespace(pin.namespace)
        tokens = tuple(pin.tokens)
        for root, number in (*self._roots.items(), *self._names.roots):
            if len(tokens) == pin.length and key_behind(root, tokens) == pin.key:
                return with_adapter(namespace_of(number), pin.adapter)
        return None

    def _tell_pin(self, pin: Pin, scheduler: Scheduler, told: list[int]) -> str | None:
        """Add the tokens of a pin that lacks them, as there are media among them, and return its namespace.

        Nothing and None if no shard holds it in cells.
        """
        for shard in scheduler.shards.values():
            for resident in (*shard.stays.parked.values(), *shard.stays.residents.values()):
                sequence = resident.sequence
                if sequence.known_tokens >= pin.length and sequence.keys.at(pin.length) == pin.key:
                    told += self._names.tokens(sequence.tokens(0, pin.length))
                    return self._namespace(sequence.request.prefix_namespace)
        return None

    def _place(self, value: object, todo: list[tuple[int, object]]) -> list[int]:
        place = self._places.get(id(value))
        if place is None:
            place = self._places[id(value)] = len(self._nodes)
            self._kept.append(value)
            self._nodes.append([])
            todo.append((place, value))
        return [place]

    def _value(self, value: Any, todo: list[tuple[int, object]]) -> Any:
        if value is None or type(value) in (str, bool, int):
            return value
        if isinstance(value, float):
            return value if math.isfinite(value) else {"inf": value > 0}
        if isinstance(value, _Medium):
            return {"medium": value.number}
        if isinstance(value, bytes):
            return {"key": self._names.key(value)}
        if is_enum(type(value)):
            return {"enum": [NAMES[type(value)], value.name]}
        return self._place(value, todo)

    def _node(self, value: Any, todo: list[tuple[int, object]]) -> Node:
        kind = type(value)
        if kind is dict or kind is OrderedDict or kind is Counter:
            pairs = [[self._value(key, todo), self._value(one, todo)] for key, one in value.items()]
            return [kind.__name__, pairs]
        if kind in (list, tuple, set, frozenset):
            return [kind.__name__, [self._value(one, todo) for one in value]]
        if kind is deque:
            return ["deque", [self._value(one, todo) for one in value], value.maxlen]
        if kind is range:
            return ["range", [value.start, value.stop]]
        if kind is array:
            return ["array", list(value)]
        if kind is PrefixKeys:
            return ["keys", self._place(value.owner, todo)]  # the keys themselves are made again
        if is_named_tuple(kind):
            parts = [self._field((kind.__name__, name), getattr(value, name), todo) for name in kind._fields]
            return ["named", NAMES[kind], parts]
        fields = {name: self._field((kind.__name__, name), getattr(value, name), todo) for name in fields_of(value)}
        if kind.__name__ == "GenerationSpec":
            root = self._names.root(with_adapter(value.namespace, value.adapter))
            fields["namespace"] = namespace_of(root)
        if isinstance(value, KeptRun) and value.start == 0:
            self._roots[value.note.before] = self._names.key(value.note.before)
        if isinstance(value, Pin):
            told: list[int] = []
            self._pins.append((value, fields, told))
            return ["object", NAMES[kind], fields, told]
        if isinstance(value, KeptRun | SavedRun | SaveEntry) and isinstance(value.note, RunNote):
            # What makes the keys is told beside the fields, if the note lacks it.
            return ["object", NAMES[kind], fields, [] if value.note.tokens else self._cells.of(value.start, value.cuts)]
        return ["object", NAMES[kind], fields]

    def _field(self, field: Field, value: Any, todo: list[tuple[int, object]]) -> Any:
        names = self._names
        if field in LEFT_OUT:
            return self._value(copy.copy(LEFT_OUT[field]), todo)
        if field in TOKENS:
            if isinstance(value, int):
                return names.token(value)
            return self._value(type(value)(*_array_code(value), names.tokens(value)), todo)
        if field in TENANTS:
            return names.tenant(value)
        if field in MEDIA:
            return {"medium": names.medium(value)}
        if field in CONTENTS:
            return {"contents": [names.medium(media_id) for media_id in value]}
        if field in HASHES:
            return {"hashes": self._later(value)}
        return self._keyed(field, value, todo)

    def _keyed(self, field: Field, value: Any, todo: list[tuple[int, object]]) -> Any:
        """Write a dictionary whose keys have other names, or any other value."""
        if field in TOKEN_KEYS:
            return self._value({self._names.token(key): one for key, one in value.items()}, todo)
        if field in MEDIA_KEYS:
            media = ((_Medium(self._names.medium(key)), one) for key, one in value.items())
            return self._value(type(value)(media), todo)
        if field in TENANT_KEYS:
            return self._value({self._names.tenant(key): one for key, one in value.items()}, todo)
        if field == ("WaitingQueue", "_buckets"):
            buckets = {(*order, self._names.tenant(tenant)): one for (*order, tenant), one in value.items()}
            return self._value(buckets, todo)
        if field in NAMESPACE_KEYS:
            return self._value({self._namespace(key): one for key, one in value.items()}, todo)
        if field in HASH_KEYS:
            return {"by_hash": self._later(value)}
        return self._value(value, todo)

    def _namespace(self, namespace: str) -> str:
        adapter = namespace.partition("\n")[0] if "\n" in namespace else ""
        return with_adapter(namespace_of(self._names.root(namespace)), adapter)

    def _later(self, value: Any) -> list[Any]:
        """Return a list that has ``value`` in the end, when all sequences are known."""
        written: list[Any] = []
        self._by_hash.append((value, written))
        return written

    def _hashed(self, value: Any, todo: list[tuple[int, object]]) -> list[Any]:
        if isinstance(value, tuple):
            return [self._hash(one, todo) for one in value]
        pairs = []
        for key, one in value.items():
            found, more = (key[0], [key[1]]) if isinstance(key, tuple) else (key, [])
            pairs.append([self._hash(found, todo), more, self._value(one, todo)])
        return pairs

    def _hash(self, value: int, todo: list[tuple[int, object]]) -> list[Any]:
        """Write a hash as a sequence that has the prefix, and which of its prefixes it is; or as it is, if none has."""
        known = self._hashes.get(value)
        return [None, value] if known is None else [self._place(known[0], todo), known[1]]


def _array_code(value: object) -> tuple[str, ...]:
    return (value.typecode,) if isinstance(value, array) else ()
