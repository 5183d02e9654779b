"""The contract over gRPC, on the toy backend."""

import asyncio
import socket
import stat
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from caravan_proto.errors import ShardError
from caravan_proto.shard.v1 import shard_pb2, shard_pb2_grpc, types_pb2
from caravan_shard.backends.base import DecodeOutcome
from caravan_shard.backends.toy.backend import ToyBackend
from caravan_shard.config import ShardConfig
from caravan_shard.service.loading import backend_loader
from caravan_shard.service.server import ShardServer
from caravan_shard.startup_error import StartupError
from caravan_testing.programs import kept_ports
from caravan_testing.shard_harness import RunningShard, prompt_chunk, refused, running_shard
from caravan_testing.toy_oracle import expected_logprobs, expected_output
from caravan_testing.waiting import DEADLINE_S, eventually, in_time

# grpc.aio works only on the event loop on which it was first used.
pytestmark = pytest.mark.asyncio(loop_scope="session")

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
SERVICE = "caravan.shard.v1.ShardService"


async def health(shard: RunningShard, service: str = SERVICE) -> int:
    stub = health_pb2_grpc.HealthStub(shard.channel)
    return (await stub.Check(health_pb2.HealthCheckRequest(service=service))).status  # type: ignore[no-any-return]


async def until_health(shard: RunningShard, status: int) -> None:
    await eventually(lambda: health(shard), f"the health is {status}", lambda found: found == status)


async def test_a_sequence_has_the_adapter_it_names() -> None:
    config = ShardConfig(backend="fake", lora=("poet", "jurist=somewhere.gguf"), embeddings=True)
    backend = backend_loader(config)()
    assert isinstance(backend, ToyBackend)
    async with running_shard(backend) as shard:
        info = await shard.stub.Info(shard_pb2.InfoRequest())
        assert list(info.model.adapters) == ["poet", "jurist"]
        assert info.limits.embedding_size == 16
        await shard.take()
        chunk = prompt_chunk(0, b"ab", ignore_eos=True, max_new=5)
        chunk.parameters.adapter = "jurist"
        output = list((await shard.prefill(chunk)).tokens.token_ids)
        async for reply in shard.steps([0]):
            output += reply.tokens.token_ids
        assert output == expected_output(b"ab", 5, ignore_eos=True, adapter="jurist")
        chunk.sequence_id = 1
        chunk.parameters.adapter = "unheard-of"
        assert await refused(shard.prefill(chunk)) is ShardError.BAD_REQUEST


async def test_prompt_logprobs_come_only_for_the_sequence_that_asks() -> None:
    async with running_shard() as shard:
        assert (await shard.stub.Info(shard_pb2.InfoRequest())).limits.max_prompt_logprob_tokens == 64
        await shard.take()
        asked = prompt_chunk(1, b"cd", logprobs=True, top_n_tokens=3)
        asked.parameters.prompt_logprobs = True
        reply = await shard.prefill(prompt_chunk(0, b"ab"), asked)
        columns = reply.prompt
        assert (list(columns.sequence_ids), list(columns.counts), list(columns.top_counts)) == ([1], [2], [0, 3])
        assert columns.logprobs[0] != columns.logprobs[0]  # NaN
        assert columns.logprobs[1] < 0
        assert columns.top_logprobs[0] == max(columns.top_logprobs)
        assert list(columns.top_pieces) == [bytes([token]) for token in columns.top_token_ids]
        assert list(columns.top_specials) == [False] * 3
        assert not (await shard.prefill(prompt_chunk(2, b"ef"))).HasField("prompt")


async def test_rows_are_evaluated_over_a_held_context_and_cut_back() -> None:
    async with running_shard() as shard:
        await shard.take()
        context = b"a context"

        def evaluate(*rows: shard_pb2.EvaluateRow, **header: Any) -> Any:
            return shard.stub.Evaluate(shard_pb2.EvaluateRequest(header=shard.header(**header), rows=rows))

        reply = await evaluate(
            shard_pb2.EvaluateRow(sequence_id=0, token_ids=context, outputs=shard_pb2.ROW_OUTPUTS_NONE)
        )
        assert reply.outcome == types_pb2.STEP_OUTCOME_OK
        assert not reply.evaluations.sequence_ids
        copy = types_pb2.PrefixCopy(source_sequence_id=0, length=len(context))
        ending = shard_pb2.EvaluateRow(
            start=len(context),
            token_ids=b"ab",
            copy=copy,
            outputs=shard_pb2.ROW_OUTPUTS_ALL,
            top_n_tokens=2,
            score_token_ids=[7, 8, 9],
            keep_length=0,
        )
        rows = [shard_pb2.EvaluateRow(sequence_id=key) for key in (2, 1)]
        for row in rows:
            row.MergeFrom(ending)
        columns = (await evaluate(*rows)).evaluations
        assert list(columns.sequence_ids) == [1, 2]
        assert list(columns.counts) == [2, 2]
        assert len(columns.score_logprobs) == 12
        assert list(columns.top_counts) == [2] * 4
        assert len(columns.top_pieces) == len(columns.top_logprobs) == 8
        expected = expected_logprobs(context + b"ab")[-1][ord("b")]
        assert columns.logprobs[0] == pytest.approx(expected, abs=1e-4)
        assert columns.logprobs[1] != columns.logprobs[1]  # NaN
        assert (await shard.keep(0)).free_cells == 8192 - len(context)
        ending.ClearField("outputs")
        assert await refused(evaluate(ending)) is ShardError.BAD_REQUEST
        shard.epoch += 1
        assert await refused(evaluate()) is ShardError.STALE_EPOCH


async def test_prompts_are_answered_and_released() -> None:
    prompts = {key: list(f"prompt {key}".encode()) for key in range(3)}
    async with running_shard() as shard:
        await shard.take()
        first = await shard.prefill(*(prompt_chunk(key, prompt) for key, prompt in prompts.items()))
        output = dict(zip(first.tokens.sequence_ids, ([token] for token in first.tokens.token_ids), strict=True))
        async for reply in shard.steps(prompts):
            assert reply.outcome == types_pb2.STEP_OUTCOME_OK
            assert reply.timings.total_ns >= reply.timings.forward_ns
            for sequence_id, token in zip(reply.tokens.sequence_ids, reply.tokens.token_ids, strict=True):
                output[sequence_id].append(token)
        assert output == {key: expected_output(prompt, 50) for key, prompt in prompts.items()}
        holdings = await shard.keep()
        assert holdings.free_cells == 8192
        assert not holdings.sequence_ids


async def test_columns_carry_pieces_logprobs_and_alternatives() -> None:
    async with running_shard() as shard:
        await shard.take()
        reply = await shard.prefill(
            prompt_chunk(0, b"ab", ignore_eos=True, max_new=1),
            prompt_chunk(1, b"cd", ignore_eos=True, logprobs=True, top_n_tokens=3),
        )
        columns = reply.tokens
        assert list(columns.pieces) == [bytes([token]) for token in columns.token_ids]
        assert list(columns.specials) == [False, False]
        assert list(columns.finish_reasons) == [
            types_pb2.FINISH_REASON_LENGTH,
            types_pb2.FINISH_REASON_UNSPECIFIED,
        ]
        assert columns.logprobs[0] != columns.logprobs[0]  # NaN
        assert list(columns.top_counts) == [0, 3]
        assert columns.top_token_ids[0] == columns.token_ids[1]
        assert columns.top_logprobs[0] == columns.logprobs[1]
        assert list(columns.top_pieces) == [bytes([token]) for token in columns.top_token_ids]


async def test_info_has_identity_limits_and_epoch() -> None:
    async with running_shard(shard_id="s7") as shard:
        info = await shard.stub.Info(shard_pb2.InfoRequest())
        assert (info.shard_id, info.epoch, info.model.name) == ("s7", 0, "toy")
        (layout,) = info.limits.layouts
        assert layout.cells == layout.cells_per_sequence == 8192
        assert layout.kv_layout == shard_pb2.KV_LAYOUT_UNIFIED
        assert info.model.eog_token_ids == [257, 259]
        await shard.take(5)
        assert (await shard.stub.Info(shard_pb2.InfoRequest())).epoch == 5
    async with running_shard() as other:
        assert (await other.stub.Info(shard_pb2.InfoRequest())).incarnation != info.incarnation


async def test_info_says_whether_a_router_holds_the_shard() -> None:
    async with running_shard() as shard:
        assert not (await shard.stub.Info(shard_pb2.InfoRequest())).leased
        await shard.take(ttl_ms=60_000)
        assert (await shard.stub.Info(shard_pb2.InfoRequest())).leased
        await shard.take(2, ttl_ms=1)

        async def leased() -> bool:
            return bool((await shard.stub.Info(shard_pb2.InfoRequest())).leased)

        await eventually(leased, "the lease ends", lambda found: not found)


async def test_watch_reports_steps_at_an_interval_and_a_drain_at_once() -> None:
    async with running_shard() as shard:
        assert await refused(shard.stub.Watch(shard_pb2.WatchRequest(interval_ms=99)).read()) is ShardError.BAD_REQUEST
        often, seldom = (shard.stub.Watch(shard_pb2.WatchRequest(interval_ms=ms)) for ms in (100, 3_600_000))
        for watch in (often, seldom):
            state = await watch.read()
            assert (state.steps, state.sequences, state.busy, state.draining) == (0, 0, False, False)
        await shard.take()
        await shard.prefill(prompt_chunk(0, b"abc"))
        async with in_time("the shard reports a step, then the drain"):
            while (state := await often.read()).steps == 0:
                pass
            assert (state.sequences, state.draining) == (1, False)
            drained = asyncio.create_task(shard.server.drain())
            assert (await seldom.read()).draining
            await shard.keep()
            await shard.give_back()
            await drained
            await shard.server.stop()
            assert (await seldom.read()).draining
            assert await seldom.read() is grpc.aio.EOF


async def test_refusals_carry_code_and_status() -> None:
    async with running_shard() as shard:
        assert await refused(shard.prefill(prompt_chunk(0, b"a"))) is ShardError.NOT_LEASED
        await shard.take()
        assert await refused(shard.prefill(prompt_chunk(9, b"a"))) is ShardError.BAD_REQUEST
        assert await refused(shard.keep(3)) is ShardError.UNKNOWN_SEQUENCE
        assert await refused(shard.decode([3]).read()) is ShardError.UNKNOWN_SEQUENCE
        assert (await shard.keep()).free_cells == 8192


async def test_a_full_cache_is_an_outcome_of_prefill_and_of_decode() -> None:
    async with running_shard(ToyBackend(cells=20)) as shard:
        await shard.take()
        await shard.prefill(prompt_chunk(0, b"x" * 17, ignore_eos=True, max_new=4))
        reply = await shard.prefill(prompt_chunk(1, b"y" * 10, max_new=2), release=[])
        assert reply.outcome == types_pb2.STEP_OUTCOME_NO_KV
        await shard.prefill(prompt_chunk(1, b"yy", ignore_eos=True, max_new=9))
        outcomes = [reply.outcome async for reply in shard.steps([0, 1])]
        assert outcomes == [types_pb2.STEP_OUTCOME_NO_KV]
        outcomes = [reply.outcome async for reply in shard.steps([0], release=[1])]
        assert outcomes == [types_pb2.STEP_OUTCOME_OK] * 3


async def test_a_failed_step_is_an_error_and_several_in_a_row_change_health() -> None:
    backend = ToyBackend()
    async with running_shard(backend) as shard:
        await shard.take()
        await shard.prefill(prompt_chunk(0, b"abc", ignore_eos=True))
        backend.hook = lambda _batch: DecodeOutcome.FAILED
        for _ in range(2):
            assert await refused(shard.decode([0]).read()) is ShardError.FORWARD_FAILED
        assert await health(shard) == SERVING
        assert await refused(shard.prefill(riders=[0])) is ShardError.FORWARD_FAILED
        await until_health(shard, NOT_SERVING)
        backend.hook = None
        assert (await shard.prefill(riders=[0])).tokens.token_ids
        await until_health(shard, SERVING)


async def test_the_health_address_answers_probes_only_and_calls_a_draining_shard_live() -> None:
    with kept_ports(1) as (port,):
        await check_health_address(f"127.0.0.1:{port}")


async def check_health_address(address: str) -> None:
    async with running_shard(health_address=address) as shard, grpc.aio.insecure_channel(address) as channel:
        probes = replace(shard, channel=channel)
        await until_health(probes, SERVING)
        assert await health(probes, "live") == await health(probes, "") == SERVING
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await shard_pb2_grpc.ShardServiceStub(channel).Info(shard_pb2.InfoRequest())
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
        await shard.take()
        draining = asyncio.create_task(shard.server.drain())
        await until_health(probes, NOT_SERVING)
        assert (await health(probes, "live"), await health(probes, "")) == (SERVING, NOT_SERVING)
        await shard.give_back()
        await draining


async def test_a_health_address_in_use_is_a_start_error(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        server = ShardServer(
            ShardConfig(backend="fake", address=f"unix:{tmp_path}/shard", health_address=f"127.0.0.1:{port}")
        )
        with pytest.raises(StartupError, match="cannot listen on 127"):
            await server.start()


async def test_initial_metadata_means_queued_and_the_next_command_ends_a_decode() -> None:
    async with running_shard(ToyBackend(step_s=0.002)) as shard:
        await shard.take()
        await shard.prefill(prompt_chunk(0, b"abc", ignore_eos=True, max_new=5_000))
        decode = shard.decode([0], max_steps=4_000)
        await decode.initial_metadata()
        replies = aiter(decode)
        await anext(replies)
        reply = await shard.prefill(prompt_chunk(1, b"def", ignore_eos=True), riders=[0])
        steps = 1 + len([reply async for reply in replies])
        assert 1 <= steps < 4_000
        output = expected_output(b"abc", 2 + steps, ignore_eos=True)
        assert reply.tokens.token_ids[0] == output[-1]


async def test_a_cancelled_decode_stops() -> None:
    async with running_shard(ToyBackend(step_s=0.002)) as shard:
        await shard.take()
        await shard.prefill(prompt_chunk(0, b"abc", ignore_eos=True, max_new=5_000))
        decode = shard.decode([0], max_steps=4_000)
        await decode.read()
        decode.cancel()
        await eventually(shard.take, "the decode ends", lambda state: not state.busy)
        assert (await shard.take()).steps < 4_000


async def test_health_and_tokenizing_and_leases_answer_during_a_step() -> None:
    entered, leave = threading.Event(), threading.Event()

    def hook(_batch: object) -> None:
        entered.set()
        leave.wait(DEADLINE_S)

    async with running_shard(ToyBackend(hook=hook)) as shard:
        await shard.take()
        call = shard.prefill(prompt_chunk(0, b"abc"))
        assert await asyncio.to_thread(entered.wait, DEADLINE_S)
        assert await health(shard) == await health(shard, "") == SERVING
        tokens = await shard.stub.Tokenize(
            shard_pb2.TokenizeRequest(text="hé<|im_end|>", add_special=True, parse_special=True)
        )
        assert list(tokens.token_ids) == [256, 104, 0xC3, 0xA9, 259]
        assert list(tokens.specials) == [True, False, False, False, True]
        text = await shard.stub.Detokenize(shard_pb2.DetokenizeRequest(token_ids=tokens.token_ids, skip_special=True))
        assert text.text.decode() == "hé"
        assert list(text.pieces) == [b"h", b"\xc3", b"\xa9"]
        assert list(text.specials) == [False] * 3
        text = await shard.stub.Detokenize(shard_pb2.DetokenizeRequest(token_ids=tokens.token_ids))
        assert list(text.pieces) == list(tokens.pieces)
        assert list(text.specials) == list(tokens.specials)
        lease = await shard.take()
        assert (lease.busy, lease.steps) == (True, 0)
        leave.set()
        await call


async def test_a_stalled_step_is_not_serving_until_it_continues() -> None:
    leave = threading.Event()

    def hook(_batch: object) -> None:
        leave.wait(DEADLINE_S)

    async with running_shard(ToyBackend(hook=hook), stall_timeout_s=0.1) as shard:
        await shard.take()
        call = shard.prefill(prompt_chunk(0, b"abc"))
        await until_health(shard, NOT_SERVING)
        leave.set()
        await call
        await until_health(shard, SERVING)


async def test_text_is_bounded() -> None:
    async with running_shard(max_tokenize_bytes=8) as shard:
        tokenize, detokenize = shard.stub.Tokenize, shard.stub.Detokenize
        assert len((await tokenize(shard_pb2.TokenizeRequest(text="12345678"))).token_ids) == 8
        assert await refused(tokenize(shard_pb2.TokenizeRequest(text="123456789"))) is ShardError.TEXT_TOO_LONG
        assert await refused(tokenize(shard_pb2.TokenizeRequest(text="äöüßä"))) is ShardError.TEXT_TOO_LONG
        request = shard_pb2.DetokenizeRequest(token_ids=[1] * 9)
        assert await refused(detokenize(request)) is ShardError.TEXT_TOO_LONG
        request = shard_pb2.DetokenizeRequest(token_ids=[260])
        assert await refused(detokenize(request)) is ShardError.BAD_REQUEST


async def test_garbage_on_the_socket_harms_nobody() -> None:
    async with running_shard() as shard:
        await shard.take()
        for garbage in (
            b"GET / HTTP/1.1\r\n\r\n",
            bytes(range(256)) * 100,
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\xff" * 999,
        ):
            with socket.socket(socket.AF_UNIX) as raw:
                raw.connect(shard.address.removeprefix("unix:"))
                raw.sendall(garbage)
        method: Any = shard.channel.unary_unary(f"/{SERVICE}/Prefill")
        with pytest.raises(grpc.aio.AioRpcError):
            await method(b"\xff\xff\xff\xff")
        assert (await shard.prefill(prompt_chunk(0, b"abc"))).tokens.token_ids


async def test_reflection_lists_the_services() -> None:
    async with running_shard() as shard:
        stub = reflection_pb2_grpc.ServerReflectionStub(shard.channel)
        call = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
        async for reply in call:
            names = [service.name for service in reply.list_services_response.service]
            assert SERVICE in names


async def test_the_socket_is_private_and_removed_at_the_end() -> None:
    async with running_shard() as shard:
        path = Path(shard.address.removeprefix("unix:"))
        assert stat.S_IMODE(path.stat().st_mode) == 0o600  # noqa: ASYNC240
    assert not path.exists()  # noqa: ASYNC240


async def test_an_address_in_use_is_a_startup_error() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        server = ShardServer(ShardConfig(backend="fake", address=address))
        with pytest.raises(StartupError, match="cannot listen"):
            await server.start()
