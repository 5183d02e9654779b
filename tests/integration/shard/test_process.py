"""The shard program: start, drain and end."""

import asyncio
import os
import signal
import sys
from pathlib import Path

import grpc.aio
import pytest

from caravan_proto.errors import ShardError
from caravan_proto.shard.v1 import shard_pb2, types_pb2
from caravan_shard.huge_pages import environment_of_shard
from caravan_testing.shard_builders import run_key
from caravan_testing.shard_harness import COMMAND, error_code, prompt_chunk, shard_process
from caravan_testing.toy_oracle import expected_output
from caravan_testing.waiting import DEADLINE_S, in_time

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_sigterm_drains_what_runs_and_refuses_what_is_new(tmp_path: Path) -> None:
    async with shard_process(tmp_path, "--fake-step-ms", "1", "--drain-timeout-s", "300") as (process, shard):
        await shard.take()
        await shard.prefill(prompt_chunk(0, b"abc", ignore_eos=True, max_new=400))
        replies = aiter(shard.decode([0]))
        await anext(replies)
        process.send_signal(signal.SIGTERM)
        refusal = None
        async with in_time("the shard refuses what is new, and runs the rest"):
            while True:
                try:
                    await shard.prefill(prompt_chunk(1, b"new", ignore_eos=True), release=[])
                except grpc.aio.AioRpcError as error:
                    refusal = error_code(error)
                    break
                await shard.keep(0)
            assert refusal is ShardError.DRAINING
            # The Decode ended early for the commands above. The sequence itself continues to its end.
            steps = len([reply async for reply in replies]) + len([reply async for reply in shard.decode([0])])
            assert steps > 300
            # The drain waits for the router, not for the release of an ended sequence.
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(asyncio.shield(process.wait()), 0.3)
            await shard.give_back()
        async with in_time("the shard ends"):
            assert await process.wait() == 0
    assert not (tmp_path / "shard").exists()


async def test_a_second_signal_ends_at_once(tmp_path: Path) -> None:
    async with shard_process(tmp_path) as (process, shard):
        await shard.take()
        await shard.prefill(prompt_chunk(0, b"abc"))
        process.send_signal(signal.SIGINT)
        async with in_time("the shard refuses commands, and ends"):
            while True:
                try:
                    await shard.prefill(prompt_chunk(1, b"x"))
                    await shard.keep(0)
                except grpc.aio.AioRpcError:
                    break
            assert process.returncode is None
            process.send_signal(signal.SIGINT)
            assert await process.wait() == 0


async def test_a_shard_that_ends_in_c_code_says_where_its_threads_were(tmp_path: Path) -> None:
    async with shard_process(tmp_path, stderr=asyncio.subprocess.PIPE) as (process, _shard):
        process.send_signal(signal.SIGSEGV)
        async with in_time("the shard ends"):
            _, said = await process.communicate()
        assert process.returncode == -signal.SIGSEGV
    assert b"Segmentation fault" in said
    assert b"caravan_shard/engine/worker.py" in said


# Each of many threads ends the process as an exception in C++ does. The program prints what ggml is told first.
TERMINATING = """
import ctypes, os, sys, threading
from caravan_shard.__main__ import main
try:
    main()
except SystemExit:
    print(os.environ["GGML_NO_BACKTRACE"], "llama_cpp" in sys.modules, flush=True)
import llama_cpp
terminate = ctypes.CDLL("libstdc++.so.6")._ZSt9terminatev
for _ in range(8):
    threading.Thread(target=terminate).start()
"""


@pytest.mark.model
async def test_threads_that_end_a_shard_at_a_time_do_not_wait_for_each_other() -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", TERMINATING, "--help"),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(DEADLINE_S):
            told, said = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == -signal.SIGABRT
    assert told.splitlines()[-1] == b"1 False"
    # The first to abort may end the process while another one still writes where the threads were.
    assert b"terminate called" in said


# Prints its number, its arguments and what the memory of a shard's program has.
SHOWING = """
import os, sys
from caravan_shard.__main__ import main
try:
    main()
except SystemExit:
    print(os.getpid(), sys.argv[1:], os.environ.get("GLIBC_TUNABLES"), file=sys.stderr)
"""


@pytest.mark.parametrize("tunables", [None, "glibc.malloc.hugetlb=0"])
async def test_a_shard_starts_again_where_huge_pages_must_be_asked_for(tunables: str | None) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "GLIBC_TUNABLES"}
    if tunables is not None:
        environment["GLIBC_TUNABLES"] = tunables
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", SHOWING, "--help"),
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
        env=environment,
    )
    async with asyncio.timeout(DEADLINE_S):
        _, said = await process.communicate()
    expected = environment_of_shard(environment).get("GLIBC_TUNABLES")
    assert said.decode() == f"{process.pid} ['--help'] {expected}\n"


async def test_a_pipe_says_that_the_shard_listens(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    command = (*COMMAND, "--backend", "fake", "--address", f"unix:{tmp_path / 'shard'}", "--ready-fd", str(writing))
    process = await asyncio.create_subprocess_exec(*command, pass_fds=(writing,))
    os.close(writing)
    try:
        async with asyncio.timeout(DEADLINE_S):
            # A byte, and the end, since the shard keeps nothing open.
            assert await asyncio.to_thread(os.read, reading, 2) == b"\n"
            assert (tmp_path / "shard").exists()
            assert await asyncio.to_thread(os.read, reading, 2) == b""
            process.terminate()
            assert await process.wait() == 0
    finally:
        os.close(reading)
        if process.returncode is None:
            process.kill()
            await process.wait()


async def test_a_descriptor_that_is_not_open_is_a_failed_start(tmp_path: Path) -> None:
    command = (*COMMAND, "--backend", "fake", "--address", f"unix:{tmp_path / 'shard'}", "--ready-fd", "77")
    process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE)
    async with asyncio.timeout(DEADLINE_S):
        _, said = await process.communicate()
    assert process.returncode == 2
    assert b"caravan-shard: error: cannot write to --ready-fd 77: Bad file descriptor" in said


def save_of(prompt: bytes) -> shard_pb2.SaveEntry:
    return shard_pb2.SaveEntry(sequence_id=0, cuts=[len(prompt)], keys=[run_key(prompt)], note=prompt[::-1])


def load_of(prompt: bytes) -> shard_pb2.LoadEntry:
    piece = shard_pb2.RunSlice(key=run_key(prompt), start=0, end=len(prompt))
    return shard_pb2.LoadEntry(sequence_id=1, token_ids=prompt, slices=[piece])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
async def test_saved_runs_outlive_the_process(tmp_path: Path, number: signal.Signals) -> None:
    flags = ("--cache-dir", str(tmp_path / "runs"), "-c", "4096", "--drain-timeout-s", "0")
    prompts = [bytes([65 + place]) * (20 + place) for place in range(8)]
    async with shard_process(tmp_path, *flags) as (process, shard):
        await shard.take()
        for prompt in prompts:
            await shard.prefill(prompt_chunk(0, prompt, ignore_eos=True))
            await shard.save(save_of(prompt))
            await shard.keep()
        await shard.keep(spill=[run_key(prompt) for prompt in prompts[:4]])
        process.send_signal(number)
        async with in_time("the shard ends"):
            assert await process.wait() == (0 if number is signal.SIGTERM else -signal.SIGKILL)
    async with shard_process(tmp_path, *flags) as (_process, shard):
        await shard.take()
        notes = await shard.notes()
        found = set(notes)
        assert all(notes.get(run_key(prompt), prompt[::-1]) == prompt[::-1] for prompt in prompts)
        if number is signal.SIGTERM:
            # What was in memory went to disk.
            assert found == {run_key(prompt) for prompt in prompts}
        for prompt in prompts:
            if run_key(prompt) not in found:
                continue
            assert list((await shard.load(load_of(prompt))).loaded) == [True]
            copy = types_pb2.PrefixCopy(source_sequence_id=1, length=len(prompt) - 1)
            first = await shard.prefill(prompt_chunk(1, prompt[-1:], copy=copy))
            assert list(first.tokens.token_ids) == expected_output(prompt, 1)
            await shard.keep()


async def test_a_drain_ends_at_its_timeout(tmp_path: Path) -> None:
    async with shard_process(tmp_path, "--drain-timeout-s", "0.2") as (process, shard):
        await shard.take()
        await shard.prefill(prompt_chunk(0, b"abc"))
        process.send_signal(signal.SIGTERM)
        async with in_time("the shard ends"):
            assert await process.wait() == 0
