"""Every message that router and shard share arrives as it was sent, with every field of the contract."""

import dataclasses
import inspect
import math
import types
import typing
from array import array
from collections.abc import Sequence
from enum import Enum
from functools import partial
from typing import Any

import pytest
from google.protobuf.descriptor import FieldDescriptor
from hypothesis import given, settings
from hypothesis import strategies as st

from caravan_proto import wire
from caravan_proto.codec import Codec, MalformedError
from caravan_proto.messages import commands, constraint, limits, media, model, results, sampling
from caravan_proto.messages.commands import RunNote, Save, SaveEntry
from caravan_proto.messages.constraint import Constraint
from caravan_proto.messages.sampling import valid_defaults
from caravan_proto.shard.v1 import shard_pb2, types_pb2
from caravan_testing.model_media import with_pictures

CODECS = {codec.kind: codec for codec in vars(wire).values() if isinstance(codec, Codec)}
# They do not travel, or not as a message of their own.
APART = {sampling.Range, model.ShardClaim}
# Written by hand: tokens and drafts of a step.
BY_HAND = {results.DraftCount}
# A value of each type that is not its default.
_SET: dict[int, Any] = {
    FieldDescriptor.TYPE_BOOL: True,
    FieldDescriptor.TYPE_BYTES: b"x",
    FieldDescriptor.TYPE_FLOAT: 0.5,
    FieldDescriptor.TYPE_STRING: "x",
    FieldDescriptor.TYPE_UINT32: 3,
    FieldDescriptor.TYPE_UINT64: 1_500_000_000,
}
_BY_TYPE: dict[Any, st.SearchStrategy[Any]] = {
    bool: st.booleans(),
    bytes: st.binary(max_size=20),
    float: st.floats(0.0, 1.0, width=32),
    int: st.integers(0, 2**32 - 1),
    str: st.text(st.characters(codec="utf-8"), max_size=10),
}
# Durations are nanoseconds on the wire, notes are bytes, and each key of metadata occurs once.
_BY_FIELD: dict[tuple[type, str], st.SearchStrategy[Any]] = {
    (SaveEntry, "note"): st.binary(max_size=20),
    (model.ModelFile, "metadata"): st.dictionaries(
        _BY_TYPE[str], st.booleans() | st.integers(-(2**63), 2**63 - 1) | _BY_TYPE[str], max_size=3
    ).map(lambda found: tuple(sorted(found.items()))),
    # What no request could send does not arrive.
    (model.ModelFile, "request_defaults"): st.dictionaries(
        st.sampled_from(["temperature", "top_k", "top_p", "repetition_penalty", "max_tokens"]), st.floats(0, 5)
    ).map(valid_defaults),
    (RunNote, "tokens"): st.lists(st.integers(0, 2**31 - 1), max_size=3).map(partial(array, "i")),
    **{
        (kind, "seconds"): st.integers(0, 10**12).map(lambda nanoseconds: nanoseconds / 1e9)
        for kind in (results.Saved, results.Loaded, results.LayoutSet, media.EncodedMedia)
    },
}


def _values(hint: Any) -> st.SearchStrategy[Any]:
    """Return values of a field's type."""
    kinds = typing.get_args(hint)
    match typing.get_origin(hint):
        case typing.Union | types.UnionType:
            return st.one_of(*(st.none() if kind is type(None) else _values(kind) for kind in kinds))
        case origin if origin is tuple and kinds[-1] is not Ellipsis:
            return st.tuples(*map(_values, kinds))
        case origin if origin in {tuple, Sequence}:
            return st.lists(_values(kinds[0]), max_size=3).map(tuple)
        case origin if origin is frozenset:
            return st.frozensets(_values(kinds[0]), max_size=3)
        case None:
            pass
        case _:
            return st.dictionaries(*map(_values, kinds), max_size=3)
    if dataclasses.is_dataclass(hint):
        return _messages(typing.cast("type", hint))
    if issubclass(hint, Enum):
        return st.sampled_from(hint)
    return _BY_TYPE[hint]


def _messages(kind: type) -> st.SearchStrategy[Any]:
    """Return messages of this kind; a field that does not travel has its default."""
    hints = typing.get_type_hints(kind)
    names = [field.name for field in dataclasses.fields(kind) if field.name not in {"shard", "command_id"}]
    return st.builds(kind, **{name: _BY_FIELD.get((kind, name), _values(hints[name])) for name in names})


@pytest.mark.parametrize("kind", CODECS, ids=lambda kind: kind.__name__)
@settings(max_examples=40)
@given(data=st.data())
def test_a_message_arrives_as_it_was_sent(kind: type, data: st.DataObject) -> None:
    codec = CODECS[kind]
    sent = data.draw(_messages(kind))
    arrived = codec.decode(codec.message.FromString(codec.encode(sent).SerializeToString()))
    assert arrived == sent


@given(note=_messages(RunNote))
def test_a_note_arrives_as_it_was_sent(note: RunNote) -> None:
    assert wire.decode_note(wire.encode_note(note)) == note


def test_every_message_has_a_codec() -> None:
    defined = {
        kind
        for module in (commands, constraint, limits, media, model, results, sampling)
        for _, kind in inspect.getmembers(module, inspect.isclass)
        if kind.__module__ == module.__name__ and not issubclass(kind, Enum)
    }
    assert defined - APART - BY_HAND == set(CODECS)


@pytest.mark.parametrize("kind", [kind for kind in CODECS if kind is not Constraint], ids=lambda kind: kind.__name__)
def test_every_field_of_the_contract_is_read(kind: type) -> None:
    codec = CODECS[kind]
    message = codec.message()
    for field in message.DESCRIPTOR.fields:
        # The epoch of a header is that of the lease, under which the router sends it.
        if field.type in _SET and not field.is_repeated and field.name != "epoch":
            setattr(message, field.name, _SET[field.type])
    again = codec.encode(codec.decode(message))
    assert {field.name for field, _ in message.ListFields()} <= {field.name for field, _ in again.ListFields()}


def test_columns_of_different_lengths_are_malformed() -> None:
    message = types_pb2.SamplingParameters(bias_token_ids=[1, 2], biases=[0.5])
    with pytest.raises(MalformedError, match=r"one of biases for each of bias_token_ids. Given: 1 and 2"):
        wire.SAMPLING.decode(message)
    entry = shard_pb2.SaveEntry(cuts=[3, 4], keys=[b"k"])
    with pytest.raises(MalformedError, match=r"one of keys for each of cuts. Given: 1 and 2"):
        wire.SAVE.decode(shard_pb2.SaveRequest(entries=[entry]))


def test_values_that_this_version_does_not_know_are_read_with_care() -> None:
    assert wire.SET_LAYOUT.decode(shard_pb2.SetLayoutRequest(kv_layout=99)).layout is None  # type: ignore[arg-type]
    layout = wire.LAYOUT_LIMITS.decode(shard_pb2.LayoutLimits(run_saving=99, prefix_sharing=99))  # type: ignore[arg-type]
    assert (layout.saving, layout.whole_only) == (limits.Saving.NOTHING, True)


def test_an_encoded_command_has_the_epoch_and_nothing_of_the_router_alone() -> None:
    sent = Save(shard="a", command_id=7, entries=[SaveEntry(sequence_id=1, start=0, cuts=((3, b"k"),), note=RunNote())])
    request = wire.encode_command(sent, epoch=5)
    assert request.header.epoch == 5
    assert wire.SAVE.decode(request) == dataclasses.replace(
        sent, shard="", command_id=0, entries=(dataclasses.replace(sent.entries[0], note=b""),)
    )
    assert math.isclose(wire.SAVED.decode(shard_pb2.SaveResponse(total_ns=1_500_000_000)).seconds, 1.5)


def test_the_numbers_of_cells_cannot_travel_to_a_shard() -> None:
    tokens, cells = with_pictures(range(1, 61), [(2, 3, 1)])
    assert cells is not None
    chunk = commands.Chunk(sequence_id=0, start=0, token_ids=tokens, last=True, media=cells.spans)
    with pytest.raises(ValueError, match=r"[Oo]ut of range"):
        wire.encode_command(commands.Prefill(chunks=(chunk,)), 1)
