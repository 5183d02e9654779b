"""Every sampling parameter of the router reaches the shard: through the router's encoder, protobuf, and the shard's
decoder.
"""

import dataclasses
from dataclasses import replace
from typing import Any

from caravan_proto.messages.commands import Chunk, Prefill, SequenceParameters
from caravan_proto.messages.sampling import SamplingParams
from caravan_proto.shard.v1 import shard_pb2
from caravan_proto.wire import PREFILL, encode_command
from caravan_scheduler.core.generation import GenerationSpec, StoppingParams
from caravan_scheduler.planning.step_plan import parameters_of
from caravan_scheduler.sequence import Sequence
from caravan_testing.requests import request

# Both are tuples, and empty by default.
TUPLES: dict[str, Any] = {"biases": ((5, 0.5), (7, -1.5)), "samplers": ("top_p", "temperature")}


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
        case frozenset():
            return frozenset({3, 250})
        case _:
            raise AssertionError(f"a sampling parameter of a new type: {default!r}")


def carried(sampling: SamplingParams, stopping: StoppingParams, feedback: float | None = None) -> SequenceParameters:
    """What the shard makes of what the router sends."""
    spec = GenerationSpec(prompt=(1, 2), sampling=sampling, stopping=stopping)
    waiting = Sequence(replace(request(1), spec=spec), feedback=feedback)
    chunk = Chunk(sequence_id=0, start=0, token_ids=(1, 2), last=True, setup=parameters_of(waiting))
    data = encode_command(Prefill(chunks=(chunk,)), epoch=1).SerializeToString()
    [received] = PREFILL.decode(shard_pb2.PrefillRequest.FromString(data)).chunks
    assert received.setup is not None
    return received.setup


def test_every_sampling_parameter_reaches_the_shard() -> None:
    fields = dataclasses.fields(SamplingParams)
    sent = SamplingParams(**{field.name: TUPLES.get(field.name) or other_than(field.default) for field in fields})
    arrived = carried(sent, StoppingParams(max_new_tokens=3)).sampling
    for field in fields:
        assert getattr(arrived, field.name) == getattr(sent, field.name), field.name


def test_a_window_of_all_tokens_is_not_one_of_none() -> None:
    sent = SamplingParams(repeat_last_n=None, dry_penalty_last_n=None)
    arrived = carried(sent, StoppingParams(max_new_tokens=3)).sampling
    assert arrived.repeat_last_n is None
    assert arrived.dry_penalty_last_n is None


def test_a_target_of_0_is_not_absent_and_feedback_comes_with_the_first_chunk() -> None:
    sent = SamplingParams(adaptive_target=0.0)
    assert carried(sent, StoppingParams(max_new_tokens=3)).sampling.adaptive_target == 0.0
    assert carried(SamplingParams(), StoppingParams(max_new_tokens=3)).sampling.adaptive_target is None
    for feedback in (None, 0.0, -2.5):
        assert carried(sent, StoppingParams(max_new_tokens=3), feedback).feedback == feedback


def test_every_stopping_parameter_reaches_the_shard() -> None:
    fields = [field for field in dataclasses.fields(StoppingParams) if field.name != "max_new_tokens"]
    sent = StoppingParams(max_new_tokens=30, **{field.name: other_than(field.default) for field in fields})
    arrived = carried(SamplingParams(), sent)
    assert arrived.max_length == 2 + 30
    for field in fields:
        assert getattr(arrived, field.name) == getattr(sent, field.name), field.name
