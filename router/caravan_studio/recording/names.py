"""Other names for what a recording must not tell. Decisions depend on which things are equal, and on nothing else.

Numbers stand for tokens, media, namespaces and API keys, in the order in which they appear; equal things have equal
numbers. So prompts have other tokens when a recording is played, and the scheduler makes other keys of their prefixes.
`Names` numbers keys as they are recorded, `PlayedNames` as they are played: a key that the scheduler makes has the same
number in both, since it makes them in the same order.

Other keys come from outside: shards have saved runs when they join, and operators pin prefixes by their keys. A player
cannot make such a key before it knows the tokens. So a line tells them when there is a sequence with this prefix. If
there never is one, no decision depends on what the key stands for.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from caravan_proto.messages.commands import Load, Save
from caravan_scheduler.core.media import Media, Picture
from caravan_scheduler.core.prompt_media import FIRST_CELL_NUMBER
from caravan_scheduler.prefix_keys import PrefixKeys
from caravan_scheduler.scheduler import Scheduler
from caravan_scheduler.shard.account import ShardAccount
from caravan_studio.recording.lines import Told

_ID_BYTES = 8
# As soon as a scheduler has so many numbers of keys, and twice as many as those that are held, the others are dropped.
_MANY_KEYS = 1 << 17


class _Numbers(dict[int, int]):
    """Numbers for tokens, in the order in which they appear. Those of cells of media stay above all token ids."""

    def __missing__(self, token: int) -> int:
        number = self[token] = len(self) + (FIRST_CELL_NUMBER if token >= FIRST_CELL_NUMBER else 0)
        return number


class _CellNumbers(_Numbers):
    """Numbers for the cells of media alone: they are made of what is in a medium."""

    def __missing__(self, token: int) -> int:
        return super().__missing__(token) if token >= FIRST_CELL_NUMBER else token


@dataclass(slots=True)
class CommonNames:
    """The numbers of one recording that all its schedulers share. Nothing outside of it can read them."""

    tokens: _Numbers
    # Ids of media and fingerprints of their encoders. None has no number but 0.
    media: dict[bytes, int] = field(default_factory=lambda: {b"": 0})
    namespaces: dict[str, int] = field(default_factory=dict)
    tenants: dict[str, str] = field(default_factory=lambda: {"": ""})
    sessions: dict[str, str] = field(default_factory=lambda: {"": ""})
    constraints: dict[object, int] = field(default_factory=dict)

    @classmethod
    def begin(cls, *, keeps_tokens: bool) -> "CommonNames":
        """Return them for a recording. ``keeps_tokens``: tokens stay as they are, except for cells of media."""
        return cls(_CellNumbers() if keeps_tokens else _Numbers())


class Names:
    """The names in one recording of what one scheduler handles."""

    def __init__(self, common: CommonNames) -> None:
        self._common = common
        self._keys: dict[bytes, int] = {}
        self._next = 0
        self._limit = _MANY_KEYS
        # The keys from outside whose tokens no line has told, with their numbers, by the length of the prefix.
        self._untold: dict[int, dict[bytes, int]] = {}

    def token(self, token: int) -> int:
        """Return the number of a token."""
        return self._common.tokens[token]

    def tokens(self, tokens: Iterable[int]) -> list[int]:
        """Return the numbers of tokens."""
        numbers = self._common.tokens
        return [numbers[token] for token in tokens]

    def medium(self, media_id: bytes) -> int:
        """Return the number of a medium, or of an encoder by its fingerprint."""
        return self._common.media.setdefault(media_id, len(self._common.media))

    def namespace(self, namespace: str) -> int:
        """Return the number of a `Request.prefix_namespace`."""
        return self._common.namespaces.setdefault(namespace, len(self._common.namespaces))

    def tenant(self, name: str) -> str:
        """Return another name for an API key."""
        return self._common.tenants.setdefault(name, f"key-{len(self._common.tenants)}")

    def session(self, session: str) -> str:
        """Return another name for a session."""
        return self._common.sessions.setdefault(session, f"session-{len(self._common.sessions)}")

    def constraint(self, constraint: object) -> int:
        """Return the number of a constraint."""
        return self._common.constraints.setdefault(constraint, len(self._common.constraints) + 1)

    def key(self, key: bytes) -> int:
        """Return the number of the key of a prefix, a new one if it is new."""
        if (number := self._keys.get(key)) is None:
            number = self._keys[key] = self._next
            self._next += 1
        return number

    def heard_key(self, key: bytes, length: int) -> int:
        """Return the number of a key from outside, which names a prefix of ``length`` tokens."""
        if key not in self._keys:
            self._untold.setdefault(length, {})[key] = self.key(key)
        return self._keys[key]

    def knows_key(self, key: bytes) -> bool:
        """Whether the key has a number."""
        return key in self._keys

    @property
    def has_untold(self) -> bool:
        """Whether there are keys whose tokens no line has told."""
        return bool(self._untold)

    def tell(self, keys: PrefixKeys, lengths: range) -> list[tuple[int, int]]:
        """Return which untold keys name prefixes of these ``lengths``, with their numbers: they count as told now."""
        told = []
        # Of a sequence that grows, there is one length at a time.
        few, many = sorted((lengths, self._untold), key=len)
        for length in sorted(length for length in few if length in many):
            number = self._untold[length].pop(keys.at(length), None)
            if number is not None:
                told.append((length, number))
            if not self._untold[length]:
                del self._untold[length]
        return told

    def forget_keys(self, scheduler: Scheduler) -> None:
        """Forget the numbers of keys that nothing holds, once there are many. `PlayedNames` does it when this does."""
        if len(self._keys) < self._limit:
            return
        held = held_keys(scheduler)
        self._keys = {key: number for key, number in self._keys.items() if key in held}
        self._limit = _limit(self._keys)
        untold = (
            (length, {key: one for key, one in keys.items() if key in held}) for length, keys in self._untold.items()
        )
        self._untold = {length: keys for length, keys in untold if keys}


class PlayedNames:
    """Names when a recording is played: they are those that the scheduler has, but for keys."""

    def __init__(self) -> None:
        self._numbers: dict[bytes, int] = {}
        self._keys: dict[int, bytes] = {}
        self._next = 0
        self._limit = _MANY_KEYS
        # What later lines tell.
        self._foretold: dict[int, bytes] = {}

    def token(self, token: int) -> int:
        """Return the token."""
        return token

    def tokens(self, tokens: Iterable[int]) -> list[int]:
        """Return the tokens."""
        return list(tokens)

    def medium(self, media_id: bytes) -> int:
        """Return the number for which `media_id_of` returns ``media_id``."""
        return int.from_bytes(media_id, "big")

    def tenant(self, name: str) -> str:
        """Return the name."""
        return name

    def key(self, key: bytes) -> int:
        """Return the number of a key that the scheduler has made."""
        if (number := self._numbers.get(key)) is None:
            number = self._next
            self._note(number, key)
        return number

    def key_of(self, number: int) -> bytes:
        """Return the key that an event names. One of which no line tells is a key that nothing else has."""
        if (key := self._keys.get(number)) is None:
            key = self._foretold.get(number, f"unknown {number}".encode())
            self._note(number, key)
        return key

    def note_key(self, number: int, key: bytes) -> None:
        """Note which key has a number, unless that is known."""
        if number not in self._keys:
            self._note(number, key)

    def _note(self, number: int, key: bytes) -> None:
        self._numbers[key], self._keys[number] = number, key
        self._next = max(self._next, number + 1)

    def foretell(self, told: Told) -> None:
        """Note what a later line will tell."""
        keys = PrefixKeys(
            with_adapter(namespace_of(told.namespace), told.adapter), lambda start, stop: told.tokens[start:stop]
        )
        for length, number in told.keys:
            self._foretold.setdefault(number, keys.at(min(length, len(told.tokens))))

    def forget_keys(self, scheduler: Scheduler) -> None:
        """Forget the numbers that `Names.forget_keys` forgot."""
        if len(self._numbers) < self._limit:
            return
        held = held_keys(scheduler)
        self._numbers = {key: number for key, number in self._numbers.items() if key in held}
        self._keys = {number: key for key, number in self._numbers.items()}
        self._limit = _limit(self._numbers)


def _limit(keys: dict[bytes, int]) -> int:
    return max(_MANY_KEYS, 2 * len(keys))


def held_keys(scheduler: Scheduler) -> set[bytes]:
    """Return the keys that a scheduler may compare with keys that it hears."""
    held = {pin.key for pin in scheduler.pins}
    runs = list(scheduler.runs_under_way)
    for shard in scheduler.shards.values():
        runs += shard.runs.describe(shard.runs.keys)
        held.update(shard.header.dropped_runs)
        held.update(_keys_under_way(shard))
        held.update(resident.prefix_key for resident in shard.stays.parked.values())
    for run in runs:
        held.add(run.note.before)
        held.update(key for _, key in run.cuts)
    return held


def _keys_under_way(shard: ShardAccount) -> Iterable[bytes]:
    for one in shard.commands.in_flight:
        if isinstance(one.command, Save):
            for saved in one.command.entries:
                yield saved.own_note.before
                yield from (key for _, key in saved.cuts)
        elif isinstance(one.command, Load):
            yield from keys_of(one.command)


def keys_of(command: Load) -> list[bytes]:
    """Return the keys of all that a command loads."""
    return [piece.key for entry in command.entries for piece in entry.slices]


def namespace_of(number: int) -> str:
    """Return the namespace, without adapter, that has this number in a recording."""
    return f"n{number}"


def with_adapter(namespace: str, adapter: str) -> str:
    """Return `Request.prefix_namespace`."""
    return f"{adapter}\n{namespace}" if adapter else namespace


def media_id_of(number: int) -> bytes:
    """Return the id of the medium, or the fingerprint of the encoder, that has this number in a recording."""
    return number.to_bytes(_ID_BYTES, "big") if number else b""


def contents_of(numbers: Iterable[int]) -> dict[bytes, Media]:
    """Return media of these numbers by their ids, without content."""
    return {(media_id := media_id_of(number)): Picture(media_id, 0, 0, b"") for number in numbers}
