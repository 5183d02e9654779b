"""Measures what a step costs on its way between router and shard: as protobuf, as it is, and as MessagePack.

``python tests/bench/wire_format.py``: processor microseconds to encode and decode a Decode and the reply of one step,
for 1, 8 and 64 sequences, and a Prefill of 512 tokens. The two formats take turns; printed is the median of the rounds.
gRPC takes any serializer, so that it could carry either. Not run by the tests. See decision 40.
"""

import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

sys.path.insert(0, str(Path(__file__).parents[1]))

from caravan_proto.messages.commands import Chunk, Decode, Prefill, SequenceParameters
from caravan_proto.messages.results import StepOutcome
from caravan_proto.messages.sampling import SamplingParams
from caravan_proto.shard.v1 import shard_pb2
from caravan_proto.wire import DECODE, PREFILL, encode_command
from caravan_router.engine.reply_codec import stepped
from caravan_router.engine.step_columns import drafts_of, feedback_of, tokens_of
from caravan_scheduler.events import Stepped
from caravan_shard.protocol.results import StepResult, StepTimings, TokenRows
from caravan_shard.service.codec import decode_response

ROUNDS = 41
REPEATS = 500

MSGPACK = msgspec.msgpack.Encoder()
STEP_DECODER = msgspec.msgpack.Decoder(StepResult)


def step_of(sequences: int) -> StepResult:
    """Return a step that gave each sequence a token."""
    rows = TokenRows(
        sequence_ids=[*range(sequences)],
        token_ids=[5000 + number for number in range(sequences)],
        pieces=[b" wagon"] * sequences,
        specials=[False] * sequences,
        finish_reasons=[None] * sequences,
    )
    timings = StepTimings(forward_ns=9_123_456, sample_ns=123_456, total_ns=9_345_678)
    return StepResult(StepOutcome.OK, rows, timings)


def step_from_msgpack(data: bytes) -> Stepped:
    """Decode what `MSGPACK` encoded, as far as the scheduler's event."""
    result = STEP_DECODER.decode(data)
    timings = result.timings
    return Stepped(
        shard="shard",
        command_id=1,
        outcome=result.outcome,
        tokens=tokens_of(result.rows, result.rows.finish_reasons),
        seconds=timings.total_ns / 1e9,
        forward_s=timings.forward_ns / 1e9,
        sample_s=timings.sample_ns / 1e9,
        drafts=() if result.drafts is None else drafts_of(result.drafts, result.drafts.sources),
        feedback=feedback_of(result.rows),
    )


def step_from_protobuf(data: bytes) -> Stepped:
    """Decode a reply, as far as the scheduler's event."""
    return stepped(shard_pb2.DecodeResponse.FromString(data).steps[0], shard="shard", command_id=1)


def microseconds(call: Callable[[], object]) -> float:
    """Return the processor time of one call."""
    began = time.process_time()
    for _ in range(REPEATS):
        call()
    return (time.process_time() - began) / REPEATS * 1e6


@dataclass(frozen=True, slots=True)
class Way:
    """One format of a message, both ways."""

    encode: Callable[[], bytes]
    decode: Callable[[bytes], object]

    def there_and_back(self) -> None:
        """Encode and decode once."""
        self.decode(self.encode())


def command_ways(command: Decode | Prefill) -> list[Way]:
    """Return the ways of a command."""
    codec: Any = PREFILL if isinstance(command, Prefill) else DECODE
    return [
        Way(
            lambda: encode_command(command, epoch=1).SerializeToString(),
            lambda data: codec.decode(codec.message.FromString(data)),
        ),
        Way(lambda: MSGPACK.encode(command), msgspec.msgpack.Decoder(type(command)).decode),
    ]


def reply_ways(step: StepResult) -> list[Way]:
    """Return the ways of the reply to a Decode."""
    return [
        Way(lambda: decode_response([step]).SerializeToString(), step_from_protobuf),
        Way(lambda: MSGPACK.encode(step), step_from_msgpack),
    ]


def report(name: str, ways: list[Way]) -> None:
    """Print the time of each way, the bytes between, and the ratio of the second time to the first."""
    times: list[list[float]] = [[] for _ in ways]
    for _ in range(ROUNDS):
        for way, spent in zip(ways, times, strict=True):
            spent.append(microseconds(way.there_and_back))
    protobuf, msgpack = map(statistics.median, times)
    ratio = statistics.median(b / a for a, b in zip(*times, strict=True))
    sizes = [len(way.encode()) for way in ways]
    print(f"{name:28}{protobuf:10.1f}{sizes[0]:8}{msgpack:10.1f}{sizes[1]:8}{ratio:8.2f}", flush=True)


def main() -> None:
    """Print a line for each message."""
    print(f"{'':28}{'protobuf':>10}{'bytes':>8}{'msgpack':>10}{'bytes':>8}{'ratio':>8}")
    for sequences in (1, 8, 64):
        decode = Decode(sequence_ids=tuple(range(sequences)), max_steps=32, reply_interval_ms=5)
        report(f"Decode, {sequences} sequences", command_ways(decode))
        report(f"its reply, {sequences} sequences", reply_ways(step_of(sequences)))
    setup = SequenceParameters(sampling=SamplingParams(temperature=0.75), prompt_length=512, max_length=640)
    chunk = Chunk(sequence_id=1, start=0, token_ids=tuple(range(5000, 5512)), last=True, setup=setup)
    report("Prefill, 512 tokens", command_ways(Prefill(chunks=(chunk,))))


if __name__ == "__main__":
    main()
