"""Parking, taking over and swapping over gRPC, on the toy backend."""

from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from caravan_proto.errors import ShardError
from caravan_proto.shard.v1 import shard_pb2, types_pb2
from caravan_shard.backends.base import PrefixSharing, StartupError
from caravan_shard.backends.toy.backend import ToyBackend
from caravan_shard.config import ShardConfig
from caravan_shard.kv_layout import KvLayout
from caravan_shard.service.server import ShardServer
from caravan_testing.shard_harness import RunningShard, error_code, prompt_chunk, running_shard
from caravan_testing.toy_oracle import expected_output

pytestmark = pytest.mark.asyncio(loop_scope="session")

PROMPT = b"a prompt to begin with"
TAIL = b" and its tail"


def prefix(source: int, length: int) -> types_pb2.PrefixCopy:
    return types_pb2.PrefixCopy(source_sequence_id=source, length=length)


def out(sequence_id: int, handle: int, start: int = 0) -> shard_pb2.SwapOutEntry:
    return shard_pb2.SwapOutEntry(sequence_id=sequence_id, handle=handle, start=start)


def back(handle: int, sequence_id: int, copy: types_pb2.PrefixCopy | None = None) -> shard_pb2.SwapInEntry:
    return shard_pb2.SwapInEntry(handle=handle, sequence_id=sequence_id, copy=copy)


async def said(shard: RunningShard, *sequence_ids: int, **decode: Any) -> dict[int, list[int]]:
    output: dict[int, list[int]] = {key: [] for key in sequence_ids}
    async for reply in shard.decode(sequence_ids, **decode):
        for key, token in zip(reply.tokens.sequence_ids, reply.tokens.token_ids, strict=True):
            output[key].append(token)
    return output


async def test_parked_copied_and_taken_over() -> None:
    async with running_shard() as shard:
        await shard.take()
        await shard.prefill(prompt_chunk(0, PROMPT, ignore_eos=True))
        await said(shard, 0, max_steps=3)
        first = await shard.prefill(prompt_chunk(4, TAIL, copy=prefix(0, 8)), park={0: 10})
        output = await said(shard, 0, 4)
        assert output == {0: [], 4: expected_output(PROMPT[:8] + TAIL, 50)[1:]}
        first = await shard.prefill(prompt_chunk(0, TAIL, copy=prefix(0, 9)), release=[4])
        output = await said(shard, 0)
        assert [*first.tokens.token_ids, *output[0]] == expected_output(PROMPT[:9] + TAIL, 50)
        assert (await shard.keep(0, park={0: 1})).free_cells == 8192 - 1


async def test_swapped_out_and_in_again() -> None:
    expected = expected_output(PROMPT + TAIL, 50, ignore_eos=True)
    async with running_shard() as shard:
        await shard.take()
        await shard.prefill(prompt_chunk(0, PROMPT))
        await shard.prefill(prompt_chunk(1, TAIL, copy=prefix(0, len(PROMPT)), ignore_eos=True))
        await said(shard, 1, max_steps=4)
        left = await shard.swap_out(out(1, 2**63, start=len(PROMPT)), park={0: len(PROMPT)})
        assert list(left.saved) == [True]
        assert left.bytes == left.used_bytes == 8 * (len(TAIL) + 4)
        assert left.total_ns > 0
        assert list((await shard.keep(0)).sequence_ids) == [0]
        came = await shard.swap_in(back(2**63, 3, prefix(0, len(PROMPT))), back(5, 6))
        assert list(came.restored) == [True, False]
        assert came.used_bytes == 0
        assert (await said(shard, 3))[3] == expected[5:]


async def test_a_new_lease_forgets_what_was_swapped() -> None:
    async with running_shard() as shard:
        await shard.take()
        await shard.prefill(prompt_chunk(0, PROMPT, ignore_eos=True))
        assert list((await shard.swap_out(out(0, 1))).saved) == [True]
        await shard.take(2)
        answer = await shard.swap_in(back(1, 0))
        assert (list(answer.restored), answer.used_bytes) == ([False], 0)


async def test_a_running_decode_gives_way_to_a_swap() -> None:
    async with running_shard(ToyBackend(step_s=0.002)) as shard:
        await shard.take()
        await shard.prefill(prompt_chunk(0, PROMPT, ignore_eos=True, max_new=5_000))
        decode = shard.decode([0], max_steps=4_000)
        await decode.initial_metadata()
        replies = aiter(decode)
        await anext(replies)
        assert list((await shard.swap_out(out(0, 1))).saved) == [True]
        assert len([reply async for reply in replies]) < 1_000


async def test_swaps_are_fenced_and_checked() -> None:
    async with running_shard() as shard:
        for call, error in (
            (shard.swap_out(out(0, 1)), ShardError.NOT_LEASED),
            (shard.swap_in(back(1, 0)), ShardError.NOT_LEASED),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call
            assert error_code(caught.value) is error
        await shard.take(2)
        await shard.prefill(prompt_chunk(0, PROMPT, ignore_eos=True))
        calls: list[tuple[Any, ShardError]] = [
            (shard.swap_out(out(1, 1)), ShardError.UNKNOWN_SEQUENCE),
            (shard.swap_out(out(0, 1, start=len(PROMPT) + 1)), ShardError.WRONG_POSITION),
            (shard.swap_in(back(1, 0)), ShardError.SEQUENCE_EXISTS),
            (shard.prefill(park={0: 0}), ShardError.WRONG_POSITION),
        ]
        for call, error in calls:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call
            assert error_code(caught.value) is error
        shard.epoch = 1
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await shard.swap_out(out(0, 1))
        assert error_code(caught.value) is ShardError.STALE_EPOCH


@pytest.mark.parametrize(
    ("sharing", "told"),
    [
        (PrefixSharing.ANY, shard_pb2.PREFIX_SHARING_ANY),
        (PrefixSharing.WHOLE_ONLY, shard_pb2.PREFIX_SHARING_WHOLE_ONLY),
    ],
)
async def test_info_has_sharing_and_swap_space(
    sharing: PrefixSharing, told: shard_pb2.PrefixSharing.ValueType, tmp_path: Path
) -> None:
    backend = ToyBackend(sharing=sharing, layout=KvLayout.SPLIT)
    async with running_shard(backend, swap_space=0.5, swap_dir=str(tmp_path), swap_dir_space=2.0) as shard:
        limits = (await shard.stub.Info(shard_pb2.InfoRequest())).limits
        assert limits.prefix_sharing == told
        assert limits.swap_bytes == 5 << 29


async def test_a_swap_folder_that_cannot_be_used_is_a_startup_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    config = ShardConfig(backend="fake", address=f"unix:{tmp_path / 'shard'}", swap_dir=str(tmp_path / "file"))
    with pytest.raises(StartupError, match="--swap-dir"):
        await ShardServer(config).start()
