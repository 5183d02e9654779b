"""Compiling constraints: valid sources, the error messages for invalid ones, and hostile sources."""

import asyncio
import json
import signal
from collections.abc import AsyncIterator, Coroutine
from time import process_time
from typing import Any

import pytest
import pytest_asyncio

from caravan_proto.limits import MAX_CONSTRAINT_BYTES
from caravan_proto.messages.constraint import Constraint, ConstraintKind
from caravan_shard.backends.toy.model import TOY_FACTS, ToyVocabulary
from caravan_shard.constraints import compiler
from caravan_shard.constraints.compiler import CheckUnavailableError, ConstraintCompiler
from caravan_shard.constraints.grammar import Grammar, Problem
from caravan_shard.constraints.tokenizer import ConstraintTokenizer
from caravan_testing.waiting import deliver

pytestmark = pytest.mark.asyncio(loop_scope="module")

SCHEMA, REGEX, LARK, GBNF = ConstraintKind


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared() -> AsyncIterator[ConstraintCompiler]:
    made = ConstraintCompiler(ConstraintTokenizer.of(ToyVocabulary(), TOY_FACTS))
    # The check gives way to other processes: on a busy machine it would run out of time, and not of processor time.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiler, "_MAX_WALL_S", 100.0)
        yield made
    await made.close()


def accepts(grammar: Grammar, text: str) -> bool:
    matcher = grammar.start()
    return matcher.consume_tokens(list(text.encode())) and matcher.is_accepting()


def schema_of(**keywords: object) -> str:
    return json.dumps(keywords)


MATCHES = [
    (SCHEMA, "true", '{"any": ["thing"]}', "nothing"),
    (SCHEMA, schema_of(type="integer", minimum=3, maximum=12), "12", "13"),
    (SCHEMA, schema_of(type="object"), '{\n  "a": 1\n}', '{\n\n"a": 1}'),
    (SCHEMA, schema_of(type="array", items={"$ref": "#"}), "[[], [[]]]", "[1]"),
    (SCHEMA, schema_of(const="ü\n"), '"ü\\n"', '"u"'),
    (SCHEMA, schema_of(title="t", description="d", default=1, examples=[], type="null"), "null", "1"),
    (REGEX, "^a/b+$", "a/bb", "a/"),
    (REGEX, "yes|no", "no", "yesno"),
    (REGEX, r"\d{3}|é", "é", "12"),
    (REGEX, "", "", "a"),
    (LARK, 'start: "a" inner\ninner: /[0-9]+/ | %json {"const": true}', "atrue", "a"),
    (LARK, '%llguidance {"no_forcing": false}\nstart: "a"+', "aa", ""),
    (GBNF, 'root ::= item+ # comment with a . and "\nitem ::= "a" | "(" root ")"', "(a(aa))", "(a"),
    (GBNF, r'root ::= "\u0041" [\u0061-\u0063\-] "\U0001F388" "\x21"', "Ac🎈!", "Ad🎈!"),
    (GBNF, 'root ::= "." .', ".\n", "."),
    (GBNF, r'root ::= [^"\\\x00-\x1f] "\"\\"', 'é"\\', '""\\'),
    (GBNF, 'root ::= "ab"{2,3} | "/" | [/]', "ababab", "ab"),
]


@pytest.mark.parametrize(("kind", "source", "good", "bad"), MATCHES)
async def test_a_compiled_constraint_matches_what_its_source_describes(
    shared: ConstraintCompiler, kind: ConstraintKind, source: str, good: str, bad: str
) -> None:
    grammar = await shared.compile(Constraint(kind, source))
    assert isinstance(grammar, Grammar), grammar
    assert accepts(grammar, good)
    assert not accepts(grammar, bad)


PROBLEMS = [
    (SCHEMA, "{", "json_schema cannot be used: Expecting property name"),
    (SCHEMA, "", "json_schema cannot be used: Expecting value"),
    (SCHEMA, "{}{}", "Extra data"),
    (SCHEMA, "[]", "it must be a JSON object"),
    (SCHEMA, "false", "it must be a JSON object"),
    (SCHEMA, '{"const": NaN}', "expected value"),
    (SCHEMA, r'{"const": "\ud800"}', "hex escape"),
    (SCHEMA, '{"const": ' + "9" * 5_000 + "}", "4300 digits"),
    (SCHEMA, schema_of(type="text"), "Invalid type: text"),
    (SCHEMA, schema_of(enum=[]), "Unsatisfiable"),
    (SCHEMA, schema_of(type="integer", minimum=3, maximum=2), "Unsatisfiable"),
    (SCHEMA, schema_of(**{"not": {}}), 'Unimplemented keys: ["not"]'),
    (SCHEMA, schema_of(**{"if": {}, "then": {}}), 'Unimplemented keys: ["if", "then"]'),
    (SCHEMA, schema_of(type="array", uniqueItems=True), "uniqueItems"),
    (SCHEMA, schema_of(type="array", contains={}), "contains"),
    (SCHEMA, schema_of(type="object", propertyNames={"maxLength": 2}), "propertyNames"),
    (SCHEMA, schema_of(type="object", dependentRequired={"a": ["b"]}), "dependentRequired"),
    (SCHEMA, schema_of(type="object", unevaluatedProperties=False), "unevaluatedProperties"),
    (SCHEMA, schema_of(properties={"a": {"not": {}}}), "not"),
    (SCHEMA, schema_of(type="string", format="telephone"), "Unknown format: telephone"),
    (SCHEMA, schema_of(type="string", pattern="(?=a)b"), "look-around"),
    (SCHEMA, schema_of(oneOf=[{"type": "string"}, {"maxLength": 3}]), "oneOf"),
    (SCHEMA, schema_of(**{"x-guidance": {"lenient": True}, "not": {}}), "x-guidance is not supported"),
    (SCHEMA, schema_of(**{"$ref": "http://localhost:1/schema"}), "does not fetch"),
    (SCHEMA, schema_of(**{"$ref": "file:///etc/passwd"}), "does not fetch"),
    (SCHEMA, schema_of(**{"$schema": "http://localhost:1/meta"}), "does not fetch"),
    (SCHEMA, schema_of(**{"$ref": "#/$defs/missing"}), "does not exist"),
    (SCHEMA, '{"items":' * 6_000 + "{}" + "}" * 6_000, "nested too deeply"),
    (SCHEMA, "[" * MAX_CONSTRAINT_BYTES, "nested too deeply"),
    (SCHEMA, schema_of(type="string", pattern="(" * 9_000 + ")" * 9_000), "nested"),
    (REGEX, "(", "unclosed group"),
    (REGEX, r"\bword\b", "lookarounds not supported"),
    (REGEX, r"(a)\1", "backreferences are not supported"),
    (REGEX, "(" * 30_000 + ")" * 30_000, "nested"),
    (
        REGEX,
        "a" * (MAX_CONSTRAINT_BYTES + 1),
        f"regex must have <= {MAX_CONSTRAINT_BYTES} bytes. Given: {MAX_CONSTRAINT_BYTES + 1}",
    ),
    (REGEX, "é" * 40_000, "Given: 80000"),
    (LARK, "", "no start rule"),
    (LARK, '{"grammars": []}', "lark cannot be used"),
    (LARK, '%include "/etc/passwd"\nstart: "a"', "lexer error"),
    (LARK, 'start: %json {"$ref": "http://localhost:1/schema"}', "does not fetch"),
    (LARK, "start: @other", "unknown grammar"),
    (LARK, "start: <no such token>", "lark cannot be used"),
    (LARK, "start: start", "nothing matches it"),
    (LARK, "start: " + "(" * 30_000, "nested"),
    (LARK, 'start: T\nT: T "a"', "circular"),
    (LARK, "start: T0\n" + "".join(f"T{n}: T{n + 1} T{n + 1}\n" for n in range(40)) + 'T40: "a"', "too big"),
    # These end the check process: llguidance does not limit the stack that they need.
    (LARK, "start: T0\n" + "".join(f'T{n}: T{n + 1} "a"\n' for n in range(3_500)) + 'T3500: "b"', "too deeply"),
    (LARK, "start: r0\n" + "".join(f"r{n}: r{n + 1} r{n + 1}\n" for n in range(3_500)) + 'r3500: "b"', "too deeply"),
    (GBNF, "root", "Expected ::="),
    (GBNF, 'other ::= "a"', "No 'root' rule"),
    (GBNF, 'root ::= "', "gbnf cannot be used"),
    (GBNF, 'root ::= "\\', "gbnf cannot be used"),
    (GBNF, r'root ::= "\U00110000"', "is no character"),
    (GBNF, "root ::= missing", "'missing' not found"),
    (GBNF, "root ::= " + "(" * 20_000, "nested too deeply"),
]


@pytest.mark.parametrize(("kind", "source", "words"), PROBLEMS)
async def test_a_constraint_that_cannot_be_used_is_refused_in_a_short_sentence(
    shared: ConstraintCompiler, kind: ConstraintKind, source: str, words: str
) -> None:
    outcome = await shared.compile(Constraint(kind, source))
    assert isinstance(outcome, Problem)
    assert words in outcome.sentence
    assert outcome.sentence.startswith(kind.value)
    assert len(outcome.sentence) < 400
    assert "\n" not in outcome.sentence
    assert "no_forcing" not in outcome.sentence
    assert "traceback" not in outcome.sentence.lower()


EXPENSIVE = [
    (REGEX, "a?" * 3_000 + "a" * 3_000),
    (REGEX, "((((a{100}){100}){100}){100}){100}"),
    (REGEX, "x{2147483647}"),
    (REGEX, "[ab]*a[ab]{30}"),
    (SCHEMA, schema_of(type="string", pattern="((a{1,1000}){1,1000}){1,1000}x")),
    (SCHEMA, schema_of(type="string", minLength=10**9)),
    (SCHEMA, schema_of(type="array", minItems=10**6, items={"type": "array", "minItems": 10**6})),
    (SCHEMA, schema_of(anyOf=[{"type": "object", "properties": {f"key{n}": {}}} for n in range(800)])),
    (SCHEMA, schema_of(type="integer", multipleOf=123_456_789, minimum=1)),
    (GBNF, "root ::= x{99999999}\nx ::= root " + '"a" | "b"'),
    (LARK, "start: T\nT: /[ab]*a[ab]{14}/ & ~/(.*aa){9}.*/ & /(.*b){5}.*/"),
    (LARK, 'start: %regex {"substring_chars": "' + "ab" * 5_000 + '"}'),
]


@pytest.mark.parametrize(("kind", "source"), EXPENSIVE)
async def test_expensive_sources_are_stopped_and_do_not_block_the_loop(
    shared: ConstraintCompiler, kind: ConstraintKind, source: str
) -> None:
    waits = [0.0]

    async def look() -> None:
        while True:
            before = process_time()
            await asyncio.sleep(0.001)
            waits.append(process_time() - before)

    looking = asyncio.create_task(look())
    before = process_time()
    await shared.compile(Constraint(kind, source))
    took_s = process_time() - before
    looking.cancel()
    # A compilation that blocked the loop would show as one gap of almost that time. Other processes' time is left out.
    assert max(waits) < max(2.0, took_s / 2)


async def test_a_process_that_does_not_answer_is_not_blamed_on_the_constraint(monkeypatch: pytest.MonkeyPatch) -> None:
    made = ConstraintCompiler(ConstraintTokenizer.of(ToyVocabulary(), TOY_FACTS))
    monkeypatch.setattr(compiler, "_MAX_WALL_S", 0.000_001)
    with pytest.raises(CheckUnavailableError, match="did not answer"):
        await made.compile(Constraint(REGEX, "a"))
    monkeypatch.undo()
    assert isinstance(await made.compile(Constraint(REGEX, "a")), Grammar)
    await made.close()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM])
async def test_a_constraint_whose_process_is_killed_or_stopped_is_checked_again(
    monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    made = ConstraintCompiler(ConstraintTokenizer.of(ToyVocabulary(), TOY_FACTS))
    assert isinstance(await made.compile(Constraint(REGEX, "a")), Grammar)
    process = made._checker._process
    assert process is not None
    waited = asyncio.wait_for

    async def wait_less(work: Coroutine[Any, Any, str], limit_s: float) -> str:
        """Wait for less time as long as the process is the first one, which may be stopped."""
        return await waited(work, 0.1 if made._checker._process is process else limit_s)

    monkeypatch.setattr(asyncio, "wait_for", wait_less)
    await deliver(process.pid, number)
    assert isinstance(await made.compile(Constraint(REGEX, "b")), Grammar)
    assert made._checker._process is not process
    await made.close()


async def test_a_failed_check_process_is_not_blamed_on_the_constraint(monkeypatch: pytest.MonkeyPatch) -> None:
    made = ConstraintCompiler(ConstraintTokenizer.of(ToyVocabulary(), TOY_FACTS))
    for program in ("/nowhere/python", "/bin/true"):
        monkeypatch.setattr("sys.executable", program)
        with pytest.raises(CheckUnavailableError, match="cannot start"):
            await made.compile(Constraint(REGEX, "a"))
    monkeypatch.undo()
    assert isinstance(await made.compile(Constraint(REGEX, "a")), Grammar)
    await made.close()


async def test_a_bounded_number_of_grammars_is_cached_and_shared(
    shared: ConstraintCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiler, "MAX_REMEMBERED", 2)
    first, again = await asyncio.gather(*(shared.compile(Constraint(REGEX, "first")) for _ in range(2)))
    assert first is again
    await shared.compile(Constraint(REGEX, "second"))
    assert await shared.compile(Constraint(REGEX, "first")) is first
    for number in range(MAX_STORED := len(shared._outcomes)):
        await shared.compile(Constraint(REGEX, f"other {number}"))
    assert len(shared._outcomes) == MAX_STORED
    assert await shared.compile(Constraint(REGEX, "first")) is not first


async def test_another_waiting_caller_takes_over_a_cancelled_compilation() -> None:
    made = ConstraintCompiler(ConstraintTokenizer.of(ToyVocabulary(), TOY_FACTS))
    constraint = Constraint(SCHEMA, "{}")
    leaving = asyncio.create_task(made.compile(constraint))
    staying = asyncio.create_task(made.compile(constraint))
    await asyncio.sleep(0.01)
    leaving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaving
    assert isinstance(await staying, Grammar)
    await made.close()
