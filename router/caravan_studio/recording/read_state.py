"""Makes a scheduler of a state that was written: its nodes become objects of known classes, none of whose code runs."""

import math
from array import array
from collections import Counter, OrderedDict, deque
from typing import Any

from caravan_scheduler.prefix_keys import PrefixKeys
from caravan_scheduler.scheduler import Scheduler
from caravan_scheduler.sequence import Sequence
from caravan_studio.recording.events import SavedCells
from caravan_studio.recording.played_media import contents_of, media_id_of
from caravan_studio.recording.prefixes import PlayedKeys, prefix_key, root_of
from caravan_studio.recording.state_classes import CLASSES, is_enum, is_named_tuple

_CONTAINERS: dict[str, type[Any]] = {
    "dict": dict,
    "OrderedDict": OrderedDict,
    "Counter": Counter,
    "list": list,
    "set": set,
    "deque": deque,
}
_TUPLES: dict[str, type[Any]] = {"tuple": tuple, "frozenset": frozenset}
_SAVED = {"events.SavedRun", "kept_run.KeptRun", "commands.SaveEntry"}
_SHORTEST_HASHED = 16


class StateError(Exception):
    """The state contradicts itself."""


class StateReader:
    """Reads one state, of a recording whose keys are ``keys``."""

    def __init__(self, nodes: list[list[Any]], keys: PlayedKeys) -> None:
        self._nodes = nodes
        self._keys = keys
        self._made: dict[int, Any] = {}
        # Dictionaries by hashes and tuples of hashes are made last, when the tokens of all sequences are known.
        self._last: list[tuple[Any, str, Any]] = []

    def read(self) -> Scheduler:
        """Return the scheduler. Raises StateError."""
        try:
            return self._read()
        except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise StateError(f"{type(error).__name__}: {error}") from error

    def _read(self) -> Scheduler:
        self.note_keys()
        for place, node in enumerate(self._nodes):
            self._make_shell(place, node)
        objects = [place for place, node in enumerate(self._nodes) if node[0] == "object"]
        for place in objects:
            self._fill_object(self._made[place], self._nodes[place][2])
        for place, node in enumerate(self._nodes):
            if node[0] == "keys":
                self._fill_keys(self._made[place], self._at(node[1][0]))
            elif node[0] in _CONTAINERS:
                self._fill_container(self._made[place], node)
        for value, name, plain in self._last:
            _set(value, name, self._hashed(plain))
        scheduler = self._made[0]
        if not isinstance(scheduler, Scheduler):
            raise StateError("its first node is no scheduler")
        return scheduler

    def _make_shell(self, place: int, node: list[Any]) -> None:
        kind = node[0]
        if kind in _CONTAINERS:
            self._made[place] = deque(maxlen=node[2]) if kind == "deque" else _CONTAINERS[kind]()
        elif kind == "object":
            made = CLASSES[node[1]]
            if is_enum(made) or is_named_tuple(made):
                raise StateError(f"{node[1]} is no object")
            self._made[place] = object.__new__(made)
        elif kind == "keys":
            self._made[place] = object.__new__(PrefixKeys)

    def _fill_object(self, value: object, fields: dict[str, Any]) -> None:
        for name, plain in fields.items():
            if name.startswith("__"):
                raise StateError(f"a field has the name {name}")
            if isinstance(plain, dict) and ("hashes" in plain or "by_hash" in plain):
                self._last.append((value, name, plain))
            else:
                _set(value, name, self._value(plain))

    @staticmethod
    def _fill_keys(keys: PrefixKeys, sequence: object) -> None:
        if not isinstance(sequence, Sequence):
            raise StateError("the keys of prefixes are of no sequence")
        keys.__init__(sequence.request.prefix_namespace, sequence.tokens)  # type: ignore[misc]

    def _fill_container(self, value: Any, node: list[Any]) -> None:
        if isinstance(value, dict):
            for key, one in node[1]:
                value[self._value(key)] = self._value(one)
        elif isinstance(value, set):
            value.update(self._value(one) for one in node[1])
        else:
            value.extend(self._value(one) for one in node[1])

    def _value(self, plain: Any) -> Any:
        if isinstance(plain, list):
            return self._at(plain[0])
        if not isinstance(plain, dict):
            return plain
        [(kind, told)] = plain.items()
        match kind:
            case "inf":
                return math.inf if told else -math.inf
            case "key":
                return self._keys.key(told)
            case "medium":
                return media_id_of(told)
            case "contents":
                return contents_of(told)
            case "enum":
                made = CLASSES[told[0]]
                if not is_enum(made):
                    raise StateError(f"{told[0]} has no members")
                return made[told[1]]
            case _:
                raise StateError(f"there is no value of the kind {kind}")

    def _at(self, place: int) -> Any:
        """Return the value of a node. One that cannot change is made when it is needed first."""
        if place not in self._made:
            node = self._nodes[place]
            match node[0]:
                case "tuple" | "frozenset":
                    self._made[place] = _TUPLES[node[0]](self._value(one) for one in node[1])
                case "named":
                    made = CLASSES[node[1]]
                    if not is_named_tuple(made):
                        raise StateError(f"{node[1]} is no tuple")
                    self._made[place] = tuple.__new__(made, [self._value(one) for one in node[2]])
                case "range":
                    self._made[place] = range(*node[1])
                case "array":
                    self._made[place] = array("i", node[1])
                case _:
                    raise StateError(f"there is no node of the kind {node[0]}")
        return self._made[place]

    # Keys and hashes

    def note_keys(self) -> None:
        """Note the keys of all saved runs, which their tokens make; each after those that it begins behind."""
        found = []
        for node in self._nodes:
            if node[0] == "object" and node[1] in _SAVED and isinstance(node[2]["note"], list):
                note = self._nodes[node[2]["note"][0]][2]
                cuts = [self._nodes[cut[0]][1] for cut in self._nodes[node[2]["cuts"][0]][1]]
                found.append(
                    SavedCells(
                        node[2]["start"],
                        [(position, key["key"]) for position, key in cuts],
                        0,
                        False,
                        False,
                        note["before"]["key"],
                        self._nodes[note["tokens"][0]][1],
                        note["tenant"],
                        note["adapter"],
                        node[3],
                    )
                )
        for run in sorted(found, key=lambda one: one.start):
            self._keys.note_run(run)
        for node in self._nodes:
            if node[0] == "object" and node[1] == "generation.GenerationSpec":
                self._keys.note_root(root_of(node[2]["namespace"]), node[2]["adapter"])
            elif node[0] == "object" and node[1] == "pins.Pin" and node[2]["namespace"] is not None:
                tokens = node[3] or self._nodes[node[2]["tokens"][0]][1]
                self._keys.note(node[2]["key"]["key"], prefix_key(node[2]["namespace"], tokens))

    def _hashed(self, plain: dict[str, Any]) -> Any:
        if "hashes" in plain:
            return tuple(self._hash(one) for one in plain["hashes"])
        found: dict[Any, Any] = {}
        for known, more, one in plain["by_hash"]:
            key = self._hash(known)
            found[(key, *more) if more else key] = self._value(one)
        return found

    def _hash(self, plain: list[Any]) -> int:
        where, place = plain
        if where is None:
            return hash(("unknown", place))
        sequence: object = self._at(where[0])
        if not isinstance(sequence, Sequence):
            raise StateError("a hash is of no sequence")
        return sequence.prefix_hashes(_SHORTEST_HASHED << place)[-1]


def _set(value: object, name: str, one: object) -> None:
    object.__setattr__(value, name, one)
