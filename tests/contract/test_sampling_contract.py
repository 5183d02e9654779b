"""Every sampling parameter of the router reaches the shard, and has the same range on both sides."""

import dataclasses
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import caravan
from caravan.sampling_params import ChoiceParameters
from caravan_dialects.api.errors import ValidationError
from caravan_dialects.api.openai.sampling import check_sampling
from caravan_dialects.api.openai.schema import SamplingFields
from caravan_proto.messages.commands import Chunk, Prefill, SequenceParameters
from caravan_proto.messages.sampling import DEFAULTS, RANGES, SAMPLER_PARAMETERS, Range, SamplingParams
from caravan_proto.shard.v1 import shard_pb2
from caravan_proto.wire import PREFILL, encode_command
from caravan_router.http.openapi import document
from caravan_scheduler.core.generation import GenerationSpec, StoppingParams
from caravan_scheduler.planning.step_plan import parameters_of
from caravan_scheduler.sequence import Sequence
from caravan_shard.checks.sampling import check_sampling as check_on_shard
from caravan_testing.requests import request

# All are tuples, and empty by default.
TUPLES: dict[str, Any] = {
    "biases": ((5, 0.5), (7, -1.5)),
    "samplers": ("top_p", "temperature"),
    "score_token_ids": (7, 3, 7),
}


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


NAMES = sorted(RANGES)
# Without its switch a parameter is not checked.
ON: dict[str, Any] = {"dry_multiplier": 1.0, "dynatemp_range": 1.0, "mirostat": 2, "adaptive_target": 0.5}


def outside(allowed: Range, lowest: float) -> list[float]:
    """Return the nearest values of the same type that are out of the range, in float32 if they are not whole."""
    if isinstance(allowed.low, int):
        return [lowest - 1, allowed.high + 1]
    below = lowest if allowed.above_low else np.nextafter(np.float32(lowest), np.float32(-math.inf))
    return [float(below), float(np.nextafter(np.float32(allowed.high), np.float32(math.inf)))]


def check_sent(name: str, value: Any) -> None:
    """Check ``value`` as one that a client has sent. Raises ValidationError."""
    fields: dict[str, Any] = {name: value}
    check_sampling(SamplingFields(**fields))


def on_shard(name: str, value: Any) -> bool:
    """Whether the shard takes ``value``."""
    switch = RANGES[name].used_with
    switched = {} if switch is None else {switch: ON[switch]}
    return check_on_shard(SamplingParams(**{**switched, name: value}), 1000) is None


@pytest.mark.parametrize("name", NAMES)
def test_the_shard_takes_the_bounds_as_they_arrive_and_nothing_beyond_them(name: str) -> None:
    allowed = RANGES[name]
    low = allowed.low if not allowed.above_low else float(np.nextafter(np.float32(allowed.low), np.float32(1)))
    for bound in (low, allowed.high):
        assert on_shard(name, bound)
        if isinstance(bound, float):
            assert on_shard(name, float(np.float32(bound)))
    for value in outside(allowed, allowed.low):
        assert not on_shard(name, value)
    assert not on_shard(name, math.nan)


@pytest.mark.parametrize("name", NAMES)
def test_clients_may_send_what_the_row_says_and_nothing_beyond_it(name: str) -> None:
    allowed = RANGES[name]
    check_sent(name, allowed.high)
    if not allowed.above_low:
        check_sent(name, allowed.lowest_sent)
    for value in outside(allowed, allowed.lowest_sent):
        with pytest.raises(ValidationError, match=name):
            check_sent(name, value)


@pytest.mark.parametrize("name", NAMES)
def test_the_description_has_the_bounds(name: str) -> None:
    components = document()["components"]["schemas"]
    allowed = RANGES[name]
    for component in ("SamplingFields", "CompletionRequest", "ChatRequest"):
        kind = components[component]["properties"][name]["anyOf"][0]
        assert kind["maximum"] == allowed.high
        assert kind["exclusiveMinimum" if allowed.above_low else "minimum"] == allowed.lowest_sent


def test_the_description_of_other_dialects_has_their_own_bounds() -> None:
    components = document()["components"]["schemas"]
    top_p = components["GenerateParameters"]["properties"]["top_p"]
    assert (top_p["exclusiveMaximum"], top_p["anyOf"][0]) == (1, {"type": "number", "exclusiveMinimum": 0.0})
    penalty = components["OllamaOptions"]["properties"]["repeat_penalty"]["anyOf"][0]
    assert (penalty["minimum"], penalty["maximum"]) == (0.01, 100.0)


def test_every_parameter_can_be_sent_and_every_default_is_allowed() -> None:
    library = {field.name for field in dataclasses.fields(caravan.SamplingParams)}
    assert {*RANGES} <= {*SamplingFields.__struct_fields__} & library & {*ChoiceParameters.__annotations__}
    for name, allowed in RANGES.items():
        default = DEFAULTS[name]
        assert default is None or allowed.low <= default <= allowed.high
        assert allowed.used_with is None or allowed.used_with in ON
    of_samplers = {name for names in SAMPLER_PARAMETERS.values() for name in names}
    assert of_samplers <= {*RANGES}
    bounds: list[dict[str, Any]] = [{name: bound} for name in NAMES for bound in (RANGES[name].low, RANGES[name].high)]
    assert {name for bound in bounds if SamplingParams(**bound).filters for name in bound} <= of_samplers
