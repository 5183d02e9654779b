"""Media of a prompt: their ids, cells and borders."""

import itertools
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from caravan_proto.messages.media import MediaSpan
from caravan_scheduler.core.media import Picture, Sound
from caravan_scheduler.core.prompt_media import (
    FIRST_CELL_NUMBER,
    PromptMedia,
    cell_numbers,
    text_ids,
    token_array,
    without_cells,
)
from caravan_scheduler.prefix_keys import PrefixKeys
from caravan_testing.model_media import ENCODER, with_pictures

_SPAN = MediaSpan(offset=0, media_id=b"m", count=5, positions=5)


def test_equal_content_has_the_same_id_and_other_content_another() -> None:
    picture = Picture.of(2, 3, bytes(18))
    assert picture.id == Picture.of(2, 3, bytes(18)).id
    others = [
        Picture.of(3, 2, bytes(18)).id,
        Picture.of(2, 3, bytes(17) + b"\1").id,
        Picture.of(6, 1, bytes(18)).id,
        Sound.of(16_000, bytes(16)).id,
        Sound.of(24_000, bytes(16)).id,
        Sound.of(16_000, bytes(20)).id,
    ]
    assert len({picture.id, *others}) == 7
    assert all(len(known) == 32 for known in (picture.id, *others))


def test_content_of_another_size_is_refused() -> None:
    with pytest.raises(ValueError, match=r"have 18 bytes\. Given: 17"):
        Picture.of(2, 3, bytes(17))
    with pytest.raises(ValueError, match="4 bytes each"):
        Sound.of(16_000, bytes(7))


def test_a_sound_knows_the_number_of_its_samples() -> None:
    assert Sound.of(16_000, bytes(40)).count == 10


def _media(places: list[tuple[int, int, int]], *, atomic: bool = True) -> tuple[tuple[int, ...], PromptMedia]:
    tokens, media = with_pictures(range(1, 61), places, atomic=atomic)
    assert media is not None
    return tokens, media


def test_a_cell_has_the_number_of_its_medium_encoder_slice_and_place() -> None:
    numbers = cell_numbers(_SPAN, b"e")
    assert len(set(numbers)) == 5
    assert all(number >= FIRST_CELL_NUMBER for number in numbers)
    assert cell_numbers(replace(_SPAN, offset=9), b"e") == numbers
    assert cell_numbers(replace(_SPAN, first=2, count=3, positions=3), b"e") == numbers[2:]
    others: list[dict[str, Any]] = [{"media_id": b"n"}, {"slice_index": 1}]
    for fields in others:
        assert not set(cell_numbers(replace(_SPAN, **fields), b"e")) & set(numbers)
    assert not set(cell_numbers(_SPAN, b"f")) & set(numbers)
    # Neither part runs into the next.
    assert cell_numbers(replace(_SPAN, media_id=b"em"), b"") != cell_numbers(_SPAN, b"e")


def test_spans_that_must_not_be_cut_have_borders() -> None:
    _, media = _media([(4, 6, 1), (10, 3, 2), (30, 2, 3)])
    assert [media.border(at) for at in (0, 4, 5, 9, 10, 11, 13, 14, 31, 32, 99)] == [
        *(0, 4, 4, 4, 10, 10, 13, 14, 30, 32, 99)
    ]
    assert [media.border_behind(at) for at in (0, 3, 4, 9, 10, 12, 13, 30)] == [1, 4, 10, 10, 13, 13, 14, 32]


def test_other_spans_may_be_cut_anywhere() -> None:
    _, media = _media([(4, 6, 1)], atomic=False)
    assert [media.border(at) for at in range(20)] == list(range(20))
    assert [media.border_behind(at) for at in range(20)] == list(range(1, 21))


@given(st.lists(st.integers(0, 60), min_size=2, max_size=8, unique=True))
def test_chunks_have_all_cells_of_all_spans_in_order(cuts: list[int]) -> None:
    tokens, media = _media([(4, 6, 1), (10, 3, 2), (30, 12, 3)], atomic=False)
    places = [0, *sorted(cuts), 60]
    found = []
    for start, stop in itertools.pairwise(places):
        part = list(without_cells(tokens[start:stop], media, start))
        for span in media.within(start, stop):
            assert part[span.offset : span.end] == [0] * span.count
            part[span.offset : span.end] = cell_numbers(span, ENCODER)
        found += part
    assert tuple(found) == tokens


def test_media_are_found_again_in_other_tokens() -> None:
    tokens, media = _media([(4, 6, 1), (20, 6, 1), (30, 2, 3)])
    found = media.located((99, *tokens))
    assert found is not None
    assert [(span.offset, span.count) for span in found.spans] == [(5, 6), (21, 6), (31, 2)]
    assert media.located(tokens[:4]) is None
    with pytest.raises(ValueError, match="part of a medium at 4"):
        media.located(tokens[:8])
    with pytest.raises(ValueError, match="part of a medium at 0"):
        media.located(cell_numbers(_SPAN, ENCODER))


def test_text_is_what_is_left_without_cells() -> None:
    tokens, _ = _media([(2, 50, 1)])
    assert text_ids(tokens) == [1, 2, *range(53, 61)]
    assert list(token_array(tokens)) == []
    assert list(token_array(tokens[:2])) == [1, 2]


@given(st.lists(st.tuples(st.integers(0, 5), st.booleans()), max_size=40), st.data())
def test_keys_are_equal_where_tokens_and_cells_are(prompt: list[tuple[int, bool]], data: st.DataObject) -> None:
    tokens = [FIRST_CELL_NUMBER + token if is_cell else token for token, is_cell in prompt]
    other = list(tokens)
    for _ in range(data.draw(st.integers(0, 2))):
        if other:
            at = data.draw(st.integers(0, len(other) - 1))
            other[at] = data.draw(st.sampled_from([0, 1, FIRST_CELL_NUMBER, FIRST_CELL_NUMBER + 1]))
    length = data.draw(st.integers(0, len(tokens)))
    own = PrefixKeys("x", lambda start, stop: tokens[start:stop])
    theirs = PrefixKeys("x", lambda start, stop: other[start:stop])
    assert (own.at(length) == theirs.at(length)) == (tokens[:length] == other[:length])
