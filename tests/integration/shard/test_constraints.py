"""Constraints, biases, stop tokens and history-dependent samplers over gRPC, on the toy backend."""

import asyncio
from typing import Any

import grpc
import grpc.aio
import pytest

from caravan_proto.errors import ShardError
from caravan_proto.messages.constraint import Constraint
from caravan_proto.messages.sampling import SamplingParams
from caravan_proto.shard.v1 import shard_pb2, types_pb2
from caravan_shard.backends.toy.backend import ToyBackend
from caravan_shard.backends.toy.model import VOCABULARY_SIZE
from caravan_shard.checks.sampling import MAX_BIASES
from caravan_shard.constraints import compiler
from caravan_shard.constraints.compiler import ConstraintCompiler
from caravan_shard.constraints.grammar import Grammar, Problem
from caravan_testing.shard_builders import toy_grammar
from caravan_testing.shard_harness import RunningShard, error_code, prompt_chunk, refused, running_shard
from caravan_testing.toy_oracle import expected_output

# grpc.aio works only on the event loop on which it was first used.
pytestmark = pytest.mark.asyncio(loop_scope="session")

PROMPT = list(b"a prompt")


def constrained(sequence_id: int, **constraint: str) -> types_pb2.PrefillChunk:
    chunk = prompt_chunk(sequence_id, PROMPT)
    chunk.parameters.constraint.CopyFrom(types_pb2.Constraint(**constraint))
    return chunk


async def compile_problem(shard: RunningShard, **constraint: str) -> str:
    request = shard_pb2.CompileConstraintRequest(constraint=types_pb2.Constraint(**constraint))
    response: shard_pb2.CompileConstraintResponse = await shard.stub.CompileConstraint(request)
    return response.problem


async def refusal(call: object) -> tuple[ShardError | None, str]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call  # type: ignore[misc]
    return error_code(caught.value), caught.value.details() or ""


async def test_a_constraint_is_compiled_without_a_lease_and_enforced() -> None:
    async with running_shard() as shard:
        assert await compile_problem(shard, regex="[xyz]{5}") == ""
        assert "Unimplemented" in await compile_problem(shard, json_schema='{"not": {}}')
        code, sentence = await refusal(shard.stub.CompileConstraint(shard_pb2.CompileConstraintRequest()))
        assert code is ShardError.BAD_REQUEST
        assert "no constraint" in sentence
        await shard.take()
        first = (await shard.prefill(constrained(0, regex="[xyz]{5}"), prompt_chunk(1, PROMPT))).tokens
        rows = [first, *[response.tokens async for response in shard.steps([0, 1])]]
        output: dict[int, list[int]] = {0: [], 1: []}
        for row in rows:
            for key, token in zip(row.sequence_ids, row.token_ids, strict=True):
                output[key].append(token)
        assert output[0] == expected_output(PROMPT, 50, grammar=toy_grammar("[xyz]{5}"))
        assert output[1] == expected_output(PROMPT, 50)


async def test_a_prefill_may_have_a_constraint_that_was_not_compiled() -> None:
    async with running_shard() as shard:
        await shard.take()
        response = await shard.prefill(constrained(0, gbnf='root ::= "q" "r"'))
        assert list(response.tokens.pieces) == [b"q"]
        code, sentence = await refusal(shard.prefill(prompt_chunk(1, PROMPT), constrained(2, lark="start: (")))
        assert code is ShardError.BAD_REQUEST
        assert "lark cannot be used" in sentence
        assert list((await shard.keep(0)).sequence_ids) == [0]


class Gate:
    """Holds every compilation until ``end`` is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun = asyncio.Event()
        self.end = asyncio.Event()
        compile_now = ConstraintCompiler.compile

        async def compile_later(compiler: ConstraintCompiler, constraint: Constraint) -> Grammar | Problem:
            self.begun.set()
            await self.end.wait()
            return await compile_now(compiler, constraint)

        monkeypatch.setattr(ConstraintCompiler, "compile", compile_later)


async def test_commands_keep_their_order_while_a_constraint_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)
    async with running_shard() as shard:
        await shard.take()
        await shard.prefill(prompt_chunk(0, PROMPT, max_new=500, ignore_eos=True))
        running = shard.decode([0], max_steps=3)
        await running.initial_metadata()
        prefill = shard.prefill(constrained(1, json_schema='{"type": "array"}'))
        await gate.begun.wait()
        # The running command continues, later ones wait.
        assert len([step async for step in running]) == 3
        decode = shard.decode([0, 1], max_steps=1)
        await asyncio.sleep(0.05)
        assert not prefill.done()
        gate.end.set()
        assert (await prefill).tokens.pieces[0] == b"["
        assert [len(response.steps[0].tokens.token_ids) async for response in decode] == [2]


async def test_decoding_and_tokenizing_continue_while_a_bomb_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    # On a busy machine, the check would otherwise time out before it finds that the grammar is too big.
    monkeypatch.setattr(compiler, "_MAX_WALL_S", 100.0)
    bomb = "start: T0\n" + "".join(f"T{n}: T{n + 1} T{n + 1}\n" for n in range(40)) + 'T40: "a"'
    async with running_shard(ToyBackend(token_s=0.002)) as shard:
        await shard.take()
        await shard.prefill(prompt_chunk(0, PROMPT, max_new=4_000, ignore_eos=True))
        steps = 0

        async def decode() -> None:
            nonlocal steps
            async for _ in shard.decode([0], max_steps=4_000):
                steps += 1

        decoding = asyncio.create_task(decode())
        await compile_problem(shard, regex="warm up")
        before = steps
        compiling = asyncio.create_task(compile_problem(shard, lark=bomb))
        answered = 0
        while not compiling.done():
            await shard.stub.Tokenize(shard_pb2.TokenizeRequest(text="text"))
            answered += 1
        assert "too big" in await compiling
        # If it waited for the compilation, one call would end, after that.
        assert answered > 2
        assert steps - before > 2
        decoding.cancel()


async def test_a_new_lease_overtakes_a_prefill_whose_constraint_is_being_compiled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gate = Gate(monkeypatch)
    async with running_shard() as shard:
        await shard.take(1)
        waiting = asyncio.ensure_future(refusal(shard.prefill(constrained(0, regex="late"))))
        await gate.begun.wait()
        await shard.take(2)
        gate.end.set()
        code, _ = await waiting
        assert code is ShardError.STALE_EPOCH


async def test_a_call_cancelled_while_its_constraint_is_compiled_delays_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gate = Gate(monkeypatch)
    async with running_shard() as shard:
        await shard.take()
        leaving = shard.prefill(constrained(0, regex="late"))
        await gate.begun.wait()
        leaving.cancel()
        assert list((await shard.prefill(prompt_chunk(1, PROMPT))).tokens.sequence_ids) == [1]
        assert list((await shard.keep(1)).sequence_ids) == [1]


BIASES = [
    ({"bias_token_ids": [1, 2], "biases": [1.0]}, "one of biases for each of bias_token_ids. Given: 1 and 2"),
    ({"bias_token_ids": [1, 1], "biases": [1.0, 2.0]}, "differ"),
    ({"bias_token_ids": [VOCABULARY_SIZE], "biases": [1.0]}, f"< {VOCABULARY_SIZE}. Given: {VOCABULARY_SIZE}"),
    ({"bias_token_ids": [2**32 - 1], "biases": [1.0]}, f"Given: {2**32 - 1}"),
    ({"bias_token_ids": [1], "biases": [100.5]}, ">= -100 and <= 100. Given: 100.5"),
    ({"bias_token_ids": [1], "biases": [float("nan")]}, "Given: nan"),
    ({"bias_token_ids": [1], "biases": [float("-inf")]}, "Given: -inf"),
    ({"bias_token_ids": [0] * (MAX_BIASES + 1), "biases": [0.0] * (MAX_BIASES + 1)}, f"<= {MAX_BIASES} biases"),
]


@pytest.mark.parametrize(("fields", "words"), BIASES)
async def test_biases_are_checked(fields: dict[str, Any], words: str) -> None:
    async with running_shard() as shard:
        await shard.take()
        code, sentence = await refusal(shard.prefill(prompt_chunk(0, PROMPT, **fields)))
        assert code is ShardError.BAD_REQUEST
        assert words in sentence


async def test_biases_change_the_output() -> None:
    async with running_shard() as shard:
        await shard.take()
        response = await shard.prefill(prompt_chunk(0, PROMPT, bias_token_ids=[90, 91], biases=[50.0, 60.0]))
        assert list(response.tokens.token_ids) == [91]


REPEATING = b"aababcabcdaababc"


async def outputs(shard: RunningShard, *chunks: types_pb2.PrefillChunk) -> dict[int, list[int]]:
    """Run them to their ends."""
    first = await shard.prefill(*chunks)
    found = dict(zip(first.tokens.sequence_ids, ([token] for token in first.tokens.token_ids), strict=True))
    async for reply in shard.steps(found):
        for sequence_id, token in zip(reply.tokens.sequence_ids, reply.tokens.token_ids, strict=True):
            found[sequence_id].append(token)
    return found


async def test_a_stop_token_has_a_reason_of_its_own() -> None:
    async with running_shard() as shard:
        await shard.take()
        chunk = prompt_chunk(0, REPEATING, ignore_eos=True, temperature=1.0, seed=2)
        chunk.parameters.stop_token_ids.extend(range(97, 110))
        chunk.parameters.min_tokens = 9
        first = await shard.prefill(chunk)
        output, reasons = list(first.tokens.token_ids), list(first.tokens.finish_reasons)
        async for reply in shard.steps([0]):
            output += reply.tokens.token_ids
            reasons += reply.tokens.finish_reasons
        sampling = SamplingParams(temperature=1.0, seed=2)
        stops = frozenset(range(97, 110))
        assert output == expected_output(
            REPEATING, 50, sampling=sampling, ignore_eos=True, stop_token_ids=stops, min_tokens=9
        )
        assert reasons[-1] == types_pb2.FINISH_REASON_STOP_TOKEN
        assert not any(reasons[:-1])


async def test_a_window_of_0_is_off_and_an_absent_one_is_everything() -> None:
    fields: dict[str, Any] = {
        "repetition_penalty": 1.5,
        "dry_multiplier": 2.0,
        "dry_base": 2.0,
        "temperature": 1.0,
        "seed": 4,
    }
    async with running_shard() as shard:
        await shard.take()
        windows = [(0, 0), (5, 7), (None, None)]
        found = await outputs(
            shard,
            *(
                prompt_chunk(key, REPEATING, ignore_eos=True, repeat_last_n=last, dry_penalty_last_n=dry_last, **fields)
                for key, (last, dry_last) in enumerate(windows)
            ),
        )
    for key, (last, dry_last) in enumerate(windows):
        sampling = SamplingParams(
            temperature=1.0,
            seed=4,
            repetition_penalty=1.5,
            repeat_last_n=last,
            dry_multiplier=2.0,
            dry_base=2.0,
            dry_allowed_length=0,
            dry_penalty_last_n=dry_last,
        )
        assert found[key] == expected_output(REPEATING, 50, sampling=sampling, ignore_eos=True)
    assert len({tuple(output) for output in found.values()}) == 3


async def test_stops_and_samplers_are_checked() -> None:
    async with running_shard() as shard:
        await shard.take()
        for fields in ({"dry_multiplier": 1.0}, {"xtc_probability": 1.5}, {"repeat_last_n": 2**32 - 1}):
            call = shard.prefill(prompt_chunk(0, REPEATING, **fields))
            assert await refused(call) is ShardError.BAD_REQUEST
        chunk = prompt_chunk(0, REPEATING)
        chunk.parameters.stop_token_ids.append(2**32 - 1)
        assert await refused(shard.prefill(chunk)) is ShardError.BAD_REQUEST
