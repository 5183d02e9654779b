"""Finds out from a chat template how its model writes calls of tools, by rendering known calls.

The functions' names and the arguments are known words: what stands between them are the delimiters. What stands before
the first call and behind the last one is compared with what stands between two calls and with a turn without calls,
which separates the delimiters of a call from those of all calls, and both from the rest of the turn.
"""

import json
import re
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import takewhile
from typing import Any

from caravan_dialects.chat.grammar_terms import terms_for
from caravan_dialects.chat.template_messages import TemplateStoppedError
from caravan_dialects.chat.template_probes import (
    CONTENT,
    IDS,
    NAMES,
    PLAIN,
    USER,
    VALUES,
    Probes,
    Render,
    arguments_of,
    conversation,
    make_room,
    rendered,
)
from caravan_dialects.chat.thought_format import thought_format_of
from caravan_dialects.chat.tool_format import HOLE, KEY, Style, Tags, ToolFormat, known_format_of, pieces
from caravan_scheduler.core.engine import Engine

_DECODER = json.JSONDecoder()
_MAX_HEADER = 200


@dataclass(frozen=True, slots=True)
class _Call:
    """A call in ``text[start:end]``; ``shape`` has what its style says of delimiters inside it."""

    start: int
    end: int
    shape: ToolFormat


def derived_format(template: str, probes: Probes) -> ToolFormat | None:
    """Return the format that ``probes``, made by ``template``, show; None if they show no calls."""
    probes = _without_frames(template, probes)
    if probes.one is None or probes.none is None:
        return None
    begin = max(probes.one.rfind(USER), 0)
    call = _find_call(probes.one, NAMES[0], begin)
    if call is None:
        return None
    before = _after_turn_opening(template, probes.none, probes.one[begin : call.start])
    if any(word in before for word in (NAMES[0], _turn_end(probes.none))):
        return None
    after = _before_turn_end(probes.none, probes.one[call.end :])
    between = _between(probes)
    shape = call.shape
    if shape.tags is not None and probes.typed is not None:
        shape = replace(shape, tags=_with_kinds(shape.tags, probes.typed))
    return _split(replace(shape, styles=_read_too(shape.style)), before, between, after)


def _without_frames(template: str, probes: Probes) -> Probes:
    """Drop the texts around answers, which the reader of thoughts takes from an output before calls are read."""
    thought = thought_format_of(template)
    frames = () if thought is None else thought.frames
    texts = {field.name: getattr(probes, field.name) for field in fields(probes)}
    for frame in frames:
        texts = {name: text and text.replace(frame, "") for name, text in texts.items()}
    return Probes(**texts)


def _read_too(style: Style) -> tuple[Style, ...]:
    return (style,) if style in (Style.OBJECT, Style.TAGS) else (style, Style.OBJECT)


def _find_call(text: str, name: str, begin: int) -> _Call | None:
    at = text.find(name, begin)
    while at >= 0:
        found = _object(text, name, at, begin) or _named(text, name, at)
        if found is not None:
            return found
        at = text.find(name, at + 1)
    return None


def _object(text: str, name: str, at: int, begin: int) -> _Call | None:
    """Find the smallest JSON object around ``at`` that has the name and the arguments."""
    start = at
    while (start := text.rfind("{", begin, start)) >= 0:
        try:
            value, end = _DECODER.raw_decode(text, start)
        except ValueError:
            continue
        if not isinstance(value, dict) or end <= at:
            continue
        shape = _object_shape(value, name, text[start:end])
        if shape is not None:
            return _Call(start, end, shape)
    return None


def _object_shape(value: Mapping[str, Any], name: str, text: str) -> ToolFormat | None:
    arguments = arguments_of(*PLAIN)
    compact = '": ' not in text
    if value == {name: arguments}:
        return ToolFormat(styles=(Style.KEYED,), compact=compact)
    keys = {"name" if inner == name else "arguments" for inner in value.values() if inner in (name, arguments)}
    if len(keys) < 2:
        return None
    order = list(value)
    name_key = next(key for key in order if value[key] == name)
    arguments_key = next(key for key in order if value[key] == arguments)
    ids = [key for key in order if isinstance(value[key], str) and key != name_key]
    return ToolFormat(
        name_key=name_key,
        arguments_key=arguments_key,
        ids=tuple((key, _id_pattern(value[key])) for key in ids),
        ids_first=bool(ids) and order.index(ids[0]) < order.index(name_key),
        compact=compact,
    )


def _id_pattern(example: str) -> str:
    if example.isdigit():
        return "[0-9]+"
    # Mistral's ids. Any other text is a constant, such as "function".
    return "[a-zA-Z0-9]{9}" if example in IDS else re.escape(example)


def _named(text: str, name: str, at: int) -> _Call | None:
    """Read a call that begins with its name."""
    behind = at + len(name)
    brace = text.find("{", behind, behind + _MAX_HEADER)
    if brace >= 0:
        try:
            value, end = _DECODER.raw_decode(text, brace)
        except ValueError:
            value, end = None, brace
        if value == arguments_of(*PLAIN):
            closing = _with_holes(text[behind:brace])
            return _Call(at, end, ToolFormat(styles=(Style.JSON,), name_closing=closing))
    (key, value), (next_key, next_value) = (VALUES[kind] for kind in PLAIN)
    places = [text.find(word, behind) for word in (key, value, next_key, str(next_value))]
    if min(places) < 0 or places != sorted(places):
        return None
    first, second, third, last = places
    before_key, before_value = text[behind:first], text[first + len(key) : second]
    before_next, before_last = text[second + len(value) : third], text[third + len(next_key) : last]
    end = last + len(str(next_value))
    if before_key == "(" and before_value.startswith("="):
        return _Call(at, text.index(")", end) + 1, ToolFormat(styles=(Style.PYTHON,)))
    if before_key == "{" and before_value.startswith(":"):
        return _Call(at, text.index("}", end) + 1, ToolFormat(styles=(Style.BRACES,), quote=before_value[1:]))
    before_next = before_next.replace(key, KEY)
    opening = _common_end(before_key, before_next)
    if not opening.strip():
        return None
    closing = before_next[: len(before_next) - len(opening)]
    if not text.startswith(closing.replace(KEY, next_key), end) or before_last[:1] != before_value[:1]:
        return None
    tags = Tags(key_opening=opening, key_closing=before_value, value_closing=closing)
    name_closing = _with_holes(before_key[: len(before_key) - len(opening)])
    if name in name_closing:
        return None
    shape = ToolFormat(styles=(Style.TAGS,), name_closing=name_closing, tags=tags)
    return _Call(at, end + len(closing.replace(KEY, next_key)), shape)


def _with_holes(text: str) -> str:
    """Replace what differs from call to call: ids, and the number of the call."""
    for known in IDS:
        text = text.replace(known, HOLE)
    return re.sub(r"[0-9]+", HOLE, text)


def _with_kinds(tags: Tags, typed: str) -> Tags:
    """Compare what stands between key and value for each type."""
    begin = max(typed.rfind(NAMES[0]), 0)
    texts: dict[str, str] = {}
    for kind, (key, value) in VALUES.items():
        at = typed.find(key, begin)
        written = next((word for word in _written(value) if typed.find(word, at) >= 0), None)
        if at < 0 or written is None:
            return tags
        texts[kind] = typed[at + len(key) : typed.index(written, at)]
    if len(set(texts.values())) == 1:
        return tags
    # Delimiters may end inside a tag: here characters count.
    start = "".join(_common(*texts.values()))
    end = "".join(reversed(_common(*(text[len(start) :][::-1] for text in texts.values()))))
    # The type is a whole word.
    start, end = start.rstrip(string.ascii_letters), end.lstrip(string.ascii_letters)
    kinds = tuple((kind, text[len(start) : len(text) - len(end)]) for kind, text in texts.items())
    return replace(tags, key_closing=start, kind_closing=end, kinds=kinds)


def _written(value: Any) -> tuple[str, ...]:
    match value:
        case bool():
            return ("true", "True")
        case list() | dict():
            return ("[", "{")[isinstance(value, dict) :]
        case _:
            return (str(value),)


def _common(*texts: Sequence[str]) -> list[str]:
    """Return the units with which all ``texts`` begin."""
    return [unit for unit, *_ in takewhile(lambda column: len({*column}) == 1, zip(*texts, strict=False))]


def _common_end(left: str, right: str) -> str:
    """Return the longest common end of two texts that begins with a whole tag."""
    return "".join(reversed(_common(pieces(left)[::-1], pieces(right)[::-1])))


def _common_start(left: str, right: str) -> str:
    return "".join(_common(pieces(left), pieces(right)))


def _after_turn_opening(template: str, none: str, before: str) -> str:
    """Return the end of ``before``, which belongs to the calls and not to the turn."""
    _, found, rest = before.rpartition(CONTENT)
    if not found:
        turn = none[max(none.rfind(USER), 0) :].partition(CONTENT)[0]
        rest = before[len(_common_start(before, turn)) :]
    thought = thought_format_of(template)
    if thought is not None:
        # What ends the thought is no part of the calls.
        rest = rest.rpartition(thought.closing.strip())[2]
    return rest.lstrip()


def _before_turn_end(none: str, after: str) -> str:
    """Return the start of ``after``, which belongs to the calls and not to the turn."""
    # Some templates write the text behind the calls.
    after = after.partition(CONTENT)[0]
    closing = after[: len(after) - len(_common_end(after, none.rpartition(CONTENT)[2]))]
    # Something else may follow the end of a turn that has calls.
    return closing.partition(_turn_end(none))[0].rstrip()


def _turn_end(none: str) -> str:
    """Return the tag that ends a turn without calls; if there is none, a text that nothing contains."""
    return next((piece for piece in pieces(none.rpartition(CONTENT)[2]) if len(piece) > 1), HOLE)


def _between(probes: Probes) -> str | None:
    """Return the text between two calls; None if the template does not show two."""
    if probes.two is None:
        return None
    begin = max(probes.two.rfind(USER), 0)
    first = _find_call(probes.two, NAMES[0], begin)
    second = None if first is None else _find_call(probes.two, NAMES[1], first.end)
    return None if first is None or second is None else probes.two[first.end : second.start]


def _split(shape: ToolFormat, before: str, between: str | None, after: str) -> ToolFormat:
    """Divide the texts around calls into those of each call and those of all calls."""
    for known in IDS:
        before, between = before.replace(known, HOLE), between and between.replace(known, HOLE)
    if between is None:
        return replace(shape, opening=before, closing=after, single=True)
    opening = _common_end(before, between)
    rest = between[: len(between) - len(opening)]
    closing = _common_start(after, rest)
    return replace(
        shape,
        section_opening=before[: len(before) - len(opening)],
        opening=opening,
        between=rest[len(closing) :],
        closing=closing,
        # Where nothing opens the calls of a turn, this ends the turn.
        section_closing=after[len(closing) :] if len(before) > len(opening) else "",
    )


class ToolFormats:
    """The formats of templates. Each template is examined once."""

    def __init__(self, render: Render) -> None:
        self._render = render
        self._formats: dict[str, ToolFormat] = {}
        # By template and model: the tags that are control tokens there.
        self._controls: dict[tuple[str, str], frozenset[str]] = {}

    async def of(self, source: str) -> ToolFormat:
        """Return the format in which the model with the template ``source`` writes calls."""
        if source in self._formats:
            return self._formats[source]
        try:
            found = known_format_of(source, derived=await self._derived(source))
        except TemplateStoppedError:
            # Perhaps the host was busy: the next request tries again.
            return known_format_of(source)
        make_room(self._formats)
        self._formats[source] = found
        return found

    async def controls(self, engine: Engine, source: str) -> frozenset[str]:
        """Return the tags in the format of ``source`` that are control tokens of the model. Raises NoShardError."""
        key = (source, engine.model.fingerprint)
        if key not in self._controls:
            terms = await terms_for(engine, (await self.of(source)).delimiters)
            make_room(self._controls)
            self._controls[key] = frozenset(terms.controls)
        return self._controls[key]

    async def _derived(self, source: str) -> ToolFormat | None:
        if "tool_calls" not in source:
            return None
        for as_text in (False, True):
            for content in (True, False):
                probes = await self._probes(source, content=content, as_text=as_text)
                if (derived := derived_format(source, probes)) is not None:
                    return derived
        return None

    async def _probes(self, source: str, *, content: bool, as_text: bool) -> Probes:
        async def probe(calls: int, kinds: tuple[str, ...] = PLAIN) -> str | None:
            variables = conversation(calls, kinds, content=content, as_text=as_text)
            return await rendered(self._render, source, variables)

        return Probes(
            none=await probe(0),
            one=await probe(1),
            two=await probe(2),
            typed=await probe(1, tuple(VALUES)),
        )
