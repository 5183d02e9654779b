"""Odd values in every field of every message to a shard: refused by a code, and the shard computes as before."""

import asyncio
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import grpc.aio
import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from caravan_proto.shard.v1 import shard_pb2, types_pb2
from caravan_testing.shard_builders import run_key
from caravan_testing.shard_harness import RunningShard, error_code, prompt_chunk, shard_process
from caravan_testing.toy_oracle import expected_output
from caravan_testing.waiting import in_time

_DEEPEST = 5
_MANY = 20_000
_INTEGERS = {
    FieldDescriptor.CPPTYPE_INT32: (0, 1, -1, 2**31 - 1, -(2**31)),
    FieldDescriptor.CPPTYPE_INT64: (0, 1, -1, 2**63 - 1, -(2**63)),
    FieldDescriptor.CPPTYPE_UINT32: (0, 1, 2**31, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 1, 2**63, 2**64 - 1),
    FieldDescriptor.CPPTYPE_ENUM: (0, 1, 99, -1),
}
_OTHERS: dict[int, tuple[Any, ...]] = {
    FieldDescriptor.CPPTYPE_BOOL: (False, True),
    FieldDescriptor.CPPTYPE_FLOAT: (0.0, -1.0, 1e-45, 3e38, math.inf, -math.inf, math.nan),
    FieldDescriptor.CPPTYPE_DOUBLE: (0.0, -1.0, 1e-320, 1e308, math.inf, -math.inf, math.nan),
}
_TEXTS = ("", "x", "\0\r\n", "é" * 100_000)


def _values(field: FieldDescriptor) -> tuple[Any, ...]:
    if field.cpp_type == FieldDescriptor.CPPTYPE_STRING:
        return _TEXTS if field.type == FieldDescriptor.TYPE_STRING else tuple(text.encode() for text in _TEXTS)
    return _INTEGERS.get(field.cpp_type) or _OTHERS[field.cpp_type]


def odd_messages(base: Message) -> Iterator[tuple[str, Message]]:
    """Yield the names and contents of messages like ``base``, each with another value of one field."""
    for path in _paths(base.DESCRIPTOR):
        for name, message in _odd(base, path):
            yield f"{'.'.join(field.name for field in path)}: {name}", message


def _paths(message: Any, above: tuple[FieldDescriptor, ...] = ()) -> Iterator[tuple[FieldDescriptor, ...]]:
    if len(above) >= _DEEPEST:
        return
    for field in message.fields:
        yield (*above, field)
        if field.message_type is not None:
            yield from _paths(field.message_type, (*above, field))


def _odd(base: Message, path: tuple[FieldDescriptor, ...]) -> Iterator[tuple[str, Message]]:
    def copied() -> tuple[Message, Message]:
        whole = type(base)()
        whole.CopyFrom(base)
        part = whole
        for field in path[:-1]:
            inner = getattr(part, field.name)
            # A message of a list is its first one, which is made if there is none.
            part = (inner[0] if len(inner) else inner.add()) if field.is_repeated else inner
        return whole, part

    last = path[-1]
    whole, part = copied()
    part.ClearField(last.name)
    yield "absent", whole
    if last.message_type is not None:
        whole, part = copied()
        inner = getattr(part, last.name)
        if last.is_repeated:
            for _ in range(_MANY):
                inner.add()
        else:
            inner.SetInParent()
        yield "empty", whole
        return
    for value in _values(last):
        whole, part = copied()
        if last.is_repeated:
            getattr(part, last.name).append(value)
            yield f"one more {value!r:.20}", whole
            if not isinstance(value, (str, bytes)) or len(value) < 100:
                whole, part = copied()
                getattr(part, last.name).extend([value] * _MANY)
                yield f"many {value!r:.20}", whole
        else:
            setattr(part, last.name, value)
            yield f"{value!r:.20}", whole


pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.slow, pytest.mark.timeout(1800)]

_PROMPT = b"abc"
# They end the shard, or let no later lease take it.
_LAST = {"Drain", "Lease"}


def _bases(shard: RunningShard) -> dict[str, Message]:
    """Return a valid request for each call that asks one: sequence 0 has a prompt then."""
    header, key = shard.header(), run_key(_PROMPT)
    return {
        "Info": shard_pb2.InfoRequest(),
        "Prefill": shard_pb2.PrefillRequest(header=header, chunks=[prompt_chunk(1, _PROMPT)], ride_sequence_ids=[0]),
        "Decode": shard_pb2.DecodeRequest(header=header, sequence_ids=[0], max_steps=2),
        "Evaluate": shard_pb2.EvaluateRequest(header=header),
        "FilterBatch": shard_pb2.FilterBatchRequest(header=header, keep_sequence_ids=[0]),
        "Save": shard_pb2.SaveRequest(
            header=header, entries=[shard_pb2.SaveEntry(sequence_id=0, cuts=[len(_PROMPT)], keys=[key])]
        ),
        "Load": shard_pb2.LoadRequest(header=header, entries=[shard_pb2.LoadEntry(sequence_id=2)]),
        "ListRuns": shard_pb2.ListRunsRequest(),
        "FetchRuns": shard_pb2.FetchRunsRequest(),
        "ReadRun": shard_pb2.ReadRunRequest(key=key),
        "LoadAdapter": shard_pb2.LoadAdapterRequest(epoch=shard.epoch, name="a", path="a.gguf", scale=1.0),
        "UnloadAdapter": shard_pb2.UnloadAdapterRequest(epoch=shard.epoch, key="a"),
        "SetLayout": shard_pb2.SetLayoutRequest(header=header, kv_layout=shard_pb2.KV_LAYOUT_SPLIT),
        "CompileConstraint": shard_pb2.CompileConstraintRequest(constraint=types_pb2.Constraint(regex="[a-z]+")),
        "Embed": shard_pb2.EmbedRequest(token_ids=[1, 2], counts=[2]),
        "Tokenize": shard_pb2.TokenizeRequest(text="abc"),
        "TokenizeTexts": shard_pb2.TokenizeTextsRequest(texts=["abc"]),
        "TokenizeParts": shard_pb2.TokenizePartsRequest(),
        "EncodeMedia": shard_pb2.EncodeMediaRequest(),
        "Detokenize": shard_pb2.DetokenizeRequest(token_ids=[1, 2]),
        "Lease": shard_pb2.LeaseRequest(router_id="test", epoch=shard.epoch, ttl_ms=600_000),
        "Drain": shard_pb2.DrainRequest(epoch=shard.epoch),
    }


def _set_epoch(request: Any, epoch: int) -> None:
    """Let a request be one of the lease that it is made under, if it says which."""
    holder = request.header if hasattr(request, "header") else request
    if hasattr(holder, "epoch"):
        holder.epoch = epoch


async def _begin(shard: RunningShard) -> None:
    """Take the shard anew, which ends what it holds, and prefill sequence 0."""
    await shard.take(shard.epoch + 1)
    await shard.prefill(prompt_chunk(0, _PROMPT))


async def _call(shard: RunningShard, method: str, request: bytes) -> str:
    """Return what is wrong with how the shard takes a request; empty for nothing."""
    service = shard_pb2.DESCRIPTOR.services_by_name["ShardService"]
    path, channel = f"/{service.full_name}/{method}", cast("Any", shard.channel)
    try:
        async with in_time(f"{method} is answered"):
            if service.methods_by_name[method].server_streaming:
                async for _ in channel.unary_stream(path)(request):
                    pass
            else:
                await channel.unary_unary(path)(request)
    except grpc.aio.AioRpcError as error:
        if error_code(error) is None:
            return f"{error.code().name}: {error.details()}"
    return ""


async def _computes(shard: RunningShard) -> bool:
    await _begin(shard)
    steps = [step async for step in shard.steps([0], max_steps=5)]
    return [token for step in steps for token in step.tokens.token_ids] == expected_output(_PROMPT, 6)[1:]


async def _try(shard: RunningShard, method: str, name: str, request: bytes, wrong: list[str]) -> None:
    await _begin(shard)
    if found := await _call(shard, method, request):
        wrong.append(f"{method} {name}: {found}")


async def test_odd_messages_are_refused_and_change_nothing(tmp_path: Path) -> None:
    tried, wrong = 0, list[str]()
    async with shard_process(tmp_path, stderr=asyncio.subprocess.PIPE) as (process, shard):
        assert process.stderr is not None
        reading = asyncio.create_task(process.stderr.read())
        methods = _bases(shard).keys()
        assert methods | {"Watch"} == set(shard_pb2.DESCRIPTOR.services_by_name["ShardService"].methods_by_name)
        for method in sorted(methods - _LAST):
            await _begin(shard)
            for name, message in odd_messages(_bases(shard)[method]):
                if not name.startswith(("header:", "header.epoch:", "epoch:")):
                    _set_epoch(message, shard.epoch + 1)
                await _try(shard, method, name, message.SerializeToString(), wrong)
                tried += 1
            whole: Any = _bases(shard)[method]
            _set_epoch(whole, shard.epoch + 1)
            await _try(shard, method, "an unknown field", whole.SerializeToString() + b"\xfa\x7f\x03abc", wrong)
            assert await _computes(shard), method
        for method in sorted(_LAST):
            for name, message in odd_messages(_bases(shard)[method]):
                if found := await _call(shard, method, message.SerializeToString()):
                    wrong.append(f"{method} {name}: {found}")
        process.terminate()
        log = (await reading).decode()
        assert await process.wait() == 0
    assert tried > 1_000
    assert not wrong, f"{len(wrong)} of {tried}:\n" + "\n".join(wrong[:100])
    assert "Traceback" not in log, log[-5_000:]
