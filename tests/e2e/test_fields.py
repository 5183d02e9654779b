"""Odd values in every field of every body in openapi.json: no 5xx, no traceback, no growth, no stream disturbed."""

import asyncio
import json
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from aiohttp import ClientSession, ClientTimeout, TCPConnector

from caravan_testing.http_server import undisturbed
from caravan_testing.serve_process import Served, serve
from caravan_testing.waiting import DEADLINE_S, eventually

# Deeper fields repeat the shapes of those above them.
_DEEPEST = 5
_LONG_TEXT = "x y" * 20_000
# As JSON, because no Python value is a number of this size, a lone surrogate or a name that is given twice.
ODD_VALUES = {
    "null": "null",
    "true": "true",
    "-1": "-1",
    "0": "0",
    "1.5": "1.5",
    "2.0": "2.0",
    "2^31": str(1 << 31),
    "-2^63-1": str(-(1 << 63) - 1),
    "2^64": str(1 << 64),
    "1e308": "1e308",
    "-1e-320": "-1e-320",
    "a number of 400 digits": "9" * 400,
    "no text": '""',
    "text": '"x"',
    "control characters": '"\\u0000\\u001b\\r\\n"',
    "a lone surrogate": '"\\ud800"',
    "a long text": json.dumps(_LONG_TEXT),
    "no items": "[]",
    "an item": '["x"]',
    "mixed items": '[null,1,"x",{},[]]',
    "many items": json.dumps([1] * 5_000),
    "deep lists": "[" * 200 + "]" * 200,
    "no members": "{}",
    "members": '{"x":1,"type":"x"}',
    "many members": json.dumps({f"x{number}": number for number in range(2_000)}),
}
_PLACE = "\ue000"


@dataclass(frozen=True, slots=True)
class Field:
    """A place in the body of an operation: names, and 0 for the first item of a list."""

    path: tuple[str | int, ...]
    schema: dict[str, Any]

    @property
    def name(self) -> str:
        return ".".join(map(str, self.path))


class Schemas:
    """The schemas of an API's description."""

    def __init__(self, description: dict[str, Any]) -> None:
        self._named = description["components"]["schemas"]

    def kinds(self, schema: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the schemas, without references and unions, any of which a value may have."""
        while "$ref" in schema:
            schema = self._named[schema["$ref"].rpartition("/")[2]]
        for word in ("anyOf", "oneOf"):
            if word in schema:
                return [kind for part in schema[word] for kind in self.kinds(part)]
        return [schema]

    def least(self, schema: dict[str, Any], depth: int = 0) -> Any:
        """Return a small value that the schema allows, but for rules between its fields."""
        if "default" in schema and schema["default"] is not None:
            return schema["default"]
        kinds = self.kinds(schema)
        kind = next((kind for kind in kinds if kind.get("type") not in ("null", None)), kinds[0])
        for word in ("const", "enum", "examples"):
            if word in kind:
                return kind[word] if word == "const" else kind[word][0]
        match kind.get("type"):
            case "object":
                fields = kind.get("properties", {})
                return {
                    name: self.least(fields[name], depth + 1) for name in kind.get("required", ()) if name in fields
                }
            case "array":
                item = kind.get("items", {})
                return [self.least(item, depth + 1)] if depth < _DEEPEST and isinstance(item, dict) else []
            case "integer" | "number":
                return kind.get("minimum", 1)
            case "boolean":
                return False
            case "string":
                return "x"
            case _:
                return None

    def fields(self, schema: dict[str, Any], above: tuple[str | int, ...] = ()) -> Iterator[Field]:
        """Yield every place in a value of the schema, each path once."""
        seen = set()
        for field in self._fields(schema, above):
            if field.path not in seen:
                seen.add(field.path)
                yield field

    def _fields(self, schema: dict[str, Any], above: tuple[str | int, ...]) -> Iterator[Field]:
        if len(above) >= _DEEPEST:
            return
        for kind in self.kinds(schema):
            parts: dict[str | int, Any] = dict(kind.get("properties", {}))
            if isinstance(kind.get("items"), dict):
                parts[0] = kind["items"]
            for name, part in parts.items():
                yield Field((*above, name), part)
                yield from self._fields(part, (*above, name))

    def with_place(self, schema: dict[str, Any], base: Any, field: Field) -> str:
        """Return ``base`` as JSON with a mark where the field is. What is missing above it is made."""
        placed = self._placed(schema, base, field.path)
        assert placed is not None, field
        return json.dumps(placed)

    def _placed(self, schema: dict[str, Any], base: Any, path: tuple[str | int, ...]) -> Any:
        """Return None if no kind of the schema has the path."""
        if not path:
            return _PLACE
        name, rest = path[0], path[1:]
        for kind in self.kinds(schema):
            if name == 0 and isinstance(kind.get("items"), dict):
                first = base[0] if isinstance(base, list) and base else self.least(kind["items"])
                if (item := self._placed(kind["items"], first, rest)) is not None:
                    return [item]
            elif (part := kind.get("properties", {}).get(name)) is not None:
                whole = self.least({**kind, "default": None}) | (base if isinstance(base, dict) else {})
                below = whole.get(name, self.least(part) if rest else None)
                if (value := self._placed(part, below, rest)) is not None:
                    return whole | {name: value}
        return None


def odd_bodies(schemas: Schemas, schema: dict[str, Any], base: Any, field: Field) -> Iterator[tuple[str, bytes]]:
    """Yield names and JSON of bodies: the field with each odd value, missing, twice, and beside an unknown one."""
    placed, mark = schemas.with_place(schema, base, field), json.dumps(_PLACE)
    for name, value in ODD_VALUES.items():
        yield f"{field.name}: {name}", placed.replace(mark, value).encode()
    last = field.path[-1]
    if isinstance(last, str):
        valid = f"{json.dumps(last)}: {json.dumps(schemas.least(field.schema))}"
        for name, members in {
            "missing": f'"x-{last}": 1',
            "twice": f"{valid}, {valid}",
            "beside an unknown name": f'{valid}, "x-unknown": {{"a": [1]}}',
            "beside a name of control characters": f'{valid}, "\\u0000\\r\\n": 1',
        }.items():
            yield f"{field.name}: {name}", placed.replace(f"{json.dumps(last)}: {mark}", members).encode()


pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(1800)]

AT_ONCE = 16
# Of the odd values of each field, a run tries so many, others each time: all of them take eight minutes.
TRIED = 8
_DEADLINE = 504
# Threads and descriptors of what a field of the second half is the first to start: processes for templates, constraints
# and pictures, and threads of pools that grow when many requests come at once. A leak would leave one for each request.
MOST_KEPT = 32
FLAGS = ("--backend", "fake", "-np", "16", "-c", "4096", "--max-total-tokens", "128", "--embeddings")
# What a body needs beyond the least that its schema asks for, so that it is a short request that succeeds.
_PROMPTS: dict[str, Any] = {"prompt": "a", "max_tokens": 2}
_MESSAGES: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}
_CONTENTS: dict[str, Any] = {"contents": [{"parts": [{"text": "a"}]}], "generationConfig": {"maxOutputTokens": 2}}
BASES: dict[str, dict[str, Any]] = {
    "/generate": {"inputs": "a", "parameters": {"max_new_tokens": 2}},
    "/generate_stream": {"inputs": "a", "parameters": {"max_new_tokens": 2}},
    "/": {"inputs": "a", "parameters": {"max_new_tokens": 2}},
    "/invocations": {"inputs": "a", "parameters": {"max_new_tokens": 2}},
    "/completion": {"prompt": "a", "n_predict": 2},
    "/completions": {"prompt": "a", "n_predict": 2},
    "/infill": {"input_prefix": "a", "input_suffix": "b", "n_predict": 2},
    "/api/chat": {"model": "x", "messages": [{"role": "user", "content": "a"}], "options": {"num_predict": 2}},
    "/api/generate": {"model": "x", "prompt": "a", "options": {"num_predict": 2}},
    "/v1/completions": _PROMPTS,
    "/v1/chat/completions": _MESSAGES,
    "/chat_tokenize": _MESSAGES,
    "/v1/messages": _MESSAGES | {"model": "x"},
    "/v1/messages/count_tokens": {"model": "x", "messages": [{"role": "user", "content": "a"}]},
    "/v1/responses": {"input": "a", "max_output_tokens": 2},
    "/v1/responses/input_tokens": {"input": "a"},
    "/v1beta/models/m:generateContent": _CONTENTS,
    "/v1beta/models/m:streamGenerateContent": _CONTENTS,
}
_ODD_IDS = ("x", "..", "%00", "a/b", "x" * 3_000, "é", "-1", "resp_x", "conv_x", "?", "\u202e")


@dataclass(frozen=True, slots=True)
class Case:
    """A request: what is odd about it, and what is sent. ``body``: JSON; None for none."""

    name: str
    method: str
    path: str
    body: bytes | None = None


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serve(*FLAGS) as running:
        yield running


async def _description(url: str) -> dict[str, Any]:
    async with ClientSession() as session, session.get(f"{url}/openapi.json") as reply:
        found: dict[str, Any] = await reply.json()
        return found


def _cases(description: dict[str, Any], known: dict[str, str], chance: random.Random) -> Iterator[Case]:
    """Yield the cases of a run. ``known``: ids by the names of the parameters of paths, where there are any."""
    schemas = Schemas(description)
    for path, operations in description["paths"].items():
        filled = path
        for name, value in known.items():
            filled = filled.replace(f"{{{name}}}", value)
        for method, operation in operations.items():
            if method == "parameters":
                continue
            content = operation.get("requestBody", {}).get("content", {})
            if "application/json" in content and "{" not in filled:
                schema = content["application/json"]["schema"]
                base = schemas.least(schema) | BASES.get(filled, {})
                for field in schemas.fields(schema):
                    odd = list(odd_bodies(schemas, schema, base, field))
                    for name, body in chance.sample(odd, min(TRIED, len(odd))):
                        yield Case(f"{method} {path} {name}", method, filled, body)
            elif "{" in path:
                for one in _ODD_IDS:
                    yield Case(f"{method} {path} {one[:20]!r}", method, re.sub(r"\{.*?\}", quote(one, safe=""), path))


@dataclass(frozen=True, slots=True)
class Usage:
    """What the server's processes hold."""

    mebibytes: float
    threads: int
    descriptors: int


def usage(served: Served) -> Usage:
    statuses = [Path(f"/proc/{pid}/status").read_text() for pid in (served.process.pid, *served.child_pids())]
    kibibytes = sum(int(re.findall(r"VmRSS:\s+(\d+)", status)[0]) for status in statuses)
    threads = sum(int(re.findall(r"Threads:\s+(\d+)", status)[0]) for status in statuses)
    return Usage(kibibytes / 1024, threads, served.descriptors())


async def _send(session: ClientSession, url: str, case: Case, wrong: list[str]) -> None:
    headers = {"Content-Type": "application/json"} if case.body is not None else {}
    async with session.request(case.method, f"{url}{case.path}", data=case.body, headers=headers) as reply:
        text = await reply.text()
    # A stream has its errors in events, after status 200. A request may ask for a deadline that it does not meet.
    if (
        (reply.status >= 500 and reply.status != _DEADLINE)
        or '"error_type":"generation"' in text
        or "Internal server error" in text
    ):
        wrong.append(f"{case.name}: {reply.status} {text[:300]}")


async def _send_all(served: Served, cases: list[Case]) -> list[str]:
    wrong: list[str] = []
    gate = asyncio.Semaphore(AT_ONCE)
    limits = ClientTimeout(total=DEADLINE_S)
    async with ClientSession(connector=TCPConnector(limit=AT_ONCE), timeout=limits) as session:

        async def send(case: Case) -> None:
            async with gate:
                await _send(session, served.url, case, wrong)

        await asyncio.gather(*(send(case) for case in cases))
    return wrong


async def test_odd_fields_are_answered_and_leave_nothing_behind(served: Served) -> None:
    description = await _description(served.url)
    async with ClientSession() as session, session.post(f"{served.url}/v1/conversations", json={}) as reply:
        known = {"conversation_id": (await reply.json())["id"], "model": "m"}
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")  # pytest shows it beside a failure
    cases = list(_cases(description, known, random.Random(seed)))
    covered = {case.path for case in cases}
    assert all(path in covered for path in BASES)
    assert len(cases) > 5_000
    async with undisturbed(served.url):
        # What is loaded at first use, and caches of limited sizes, are filled by the first half.
        wrong = await _send_all(served, cases[::2])
        before = await asyncio.to_thread(usage, served)
        wrong += await _send_all(served, cases[1::2])
    assert not wrong, f"{len(wrong)} of {len(cases)}:\n" + "\n".join(wrong[:100])
    assert served.healthy()
    assert not [line for line in served.log if line.startswith("Traceback")]
    after = await eventually(
        lambda: usage(served),
        f"about as many threads and descriptors are left as in {before}",
        lambda found: max(found.threads - before.threads, found.descriptors - before.descriptors) <= MOST_KEPT,
    )
    assert after.mebibytes < before.mebibytes + 64
