"""Every sampling parameter of the router reaches the shard: through the router's encoder, protobuf, and the shard's
decoder.
"""

import dataclasses
from typing import Any

from caravan_proto.shard.v1 import shard_pb2
from caravan_router.core.generation import GenerationSpec
from caravan_router.core.sampling import SamplingParams, StoppingParams
from caravan_router.engine.command_codec import prefill_request
from caravan_router.scheduling.actions import Chunk, Header, Prefill
from caravan_shard.protocol.sequence_parameters import SequenceParameters
from caravan_shard.sampling.parameters import Biases
from caravan_shard.service.command_codec import prefill_command


def other_than(default: Any) -> Any:
    """A value of the same type that protobuf carries exactly and that is not ``default``."""
    match default:
        case bool():
            return not default
        case int():
            return default + 3
        case float():
            return 3.5
        case None:
            return 0
        case tuple():
            return ((5, 0.5), (7, -1.5))
        case frozenset():
            return frozenset({3, 250})
        case _:
            raise AssertionError(f"a sampling parameter of a new type: {default!r}")


def as_pairs(value: Any) -> Any:
    return tuple(zip(value.ids.tolist(), value.values.tolist(), strict=True)) if isinstance(value, Biases) else value


def carried(sampling: SamplingParams, stopping: StoppingParams) -> SequenceParameters:
    """What the shard makes of what the router sends."""
    spec = GenerationSpec(prompt=(1, 2), sampling=sampling, stopping=stopping)
    chunk = Chunk(sequence_id=0, start=0, token_ids=(1, 2), last=True, setup=spec)
    command = Prefill(shard="s", command_id=1, header=Header(), chunks=(chunk,), ride=())
    message = shard_pb2.PrefillRequest.FromString(prefill_request(command, epoch=1).SerializeToString())
    [received] = prefill_command(message, {}).chunks
    assert received.parameters is not None
    return received.parameters


def test_every_sampling_parameter_reaches_the_shard() -> None:
    fields = dataclasses.fields(SamplingParams)
    sent = SamplingParams(**{field.name: other_than(field.default) for field in fields})
    arrived = carried(sent, StoppingParams(max_new_tokens=3)).sampling
    for field in fields:
        assert as_pairs(getattr(arrived, field.name)) == getattr(sent, field.name), field.name


def test_a_window_of_all_tokens_is_not_one_of_none() -> None:
    sent = SamplingParams(repeat_last_n=None, dry_penalty_last_n=None)
    arrived = carried(sent, StoppingParams(max_new_tokens=3)).sampling
    assert arrived.repeat_last_n is None
    assert arrived.dry_penalty_last_n is None


def test_every_stopping_parameter_reaches_the_shard() -> None:
    fields = [field for field in dataclasses.fields(StoppingParams) if field.name != "max_new_tokens"]
    sent = StoppingParams(max_new_tokens=30, **{field.name: other_than(field.default) for field in fields})
    arrived = carried(SamplingParams(), sent)
    assert arrived.max_length == 2 + 30
    for field in fields:
        assert getattr(arrived, field.name) == getattr(sent, field.name), field.name
