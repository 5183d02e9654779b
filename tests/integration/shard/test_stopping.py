"""Stop tokens and history-dependent samplers over gRPC: what is sent arrives, and what is absent is off."""

from typing import Any

from caravan_proto.errors import ShardError
from caravan_proto.messages.sampling import SamplingParams
from caravan_proto.shard.v1 import types_pb2
from caravan_testing.shard_harness import RunningShard, prompt_chunk, refused, running_shard
from caravan_testing.toy_oracle import expected_output

PROMPT = b"aababcabcdaababc"


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
        chunk = prompt_chunk(0, PROMPT, ignore_eos=True, temperature=1.0, seed=2)
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
            PROMPT, 50, sampling=sampling, ignore_eos=True, stop_token_ids=stops, min_tokens=9
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
                prompt_chunk(key, PROMPT, ignore_eos=True, repeat_last_n=last, dry_penalty_last_n=dry_last, **fields)
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
        assert found[key] == expected_output(PROMPT, 50, sampling=sampling, ignore_eos=True)
    assert len({tuple(output) for output in found.values()}) == 3


async def test_stops_and_samplers_are_checked() -> None:
    async with running_shard() as shard:
        await shard.take()
        for fields in ({"dry_multiplier": 1.0}, {"xtc_probability": 1.5}, {"repeat_last_n": 2**32 - 1}):
            call = shard.prefill(prompt_chunk(0, PROMPT, **fields))
            assert await refused(call) is ShardError.BAD_REQUEST
        chunk = prompt_chunk(0, PROMPT)
        chunk.parameters.stop_token_ids.append(2**32 - 1)
        assert await refused(shard.prefill(chunk)) is ShardError.BAD_REQUEST
